package openai

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// Error is a refusal or failure in the API's shape. Empty Param and Code render as null.
type Error struct {
	Status  int    // HTTP status
	Message string // for people
	Type    string // invalid_request_error, authentication_error, rate_limit_error, server_error
	Param   string // the field at fault
	Code    string // for programs

	RetryAfter int // seconds for the header Retry-After; 0 leaves it to the HTTP layer
}

// Error types.
const (
	TypeInvalid   = "invalid_request_error"
	TypeAuth      = "authentication_error"
	TypeRateLimit = "rate_limit_error"
	TypeServer    = "server_error"
)

func (e *Error) Error() string {
	if e.Param != "" {
		return fmt.Sprintf("%d %s: %s", e.Status, e.Param, e.Message)
	}
	return fmt.Sprintf("%d %s", e.Status, e.Message)
}

// WithStatus gives e another status and code.
func (e *Error) WithStatus(status int, code string) *Error {
	e.Status, e.Code = status, code
	return e
}

// BadRequest is a 400 that names the field at fault ("" when it is the body).
func BadRequest(param, format string, args ...any) *Error {
	return &Error{Status: 400, Type: TypeInvalid, Param: param, Message: fmt.Sprintf(format, args...)}
}

// Unauthorized is a 401.
func Unauthorized(format string, args ...any) *Error {
	return &Error{Status: 401, Type: TypeAuth, Code: "invalid_api_key", Message: fmt.Sprintf(format, args...)}
}

// NotFound is a 404; for an unknown model use ModelNotFound.
func NotFound(format string, args ...any) *Error {
	return &Error{Status: 404, Type: TypeInvalid, Code: "not_found", Message: fmt.Sprintf(format, args...)}
}

// ModelNotFound is the 404 for a model that nobody serves.
func ModelNotFound(model string) *Error {
	return &Error{Status: 404, Type: TypeInvalid, Param: "model", Code: "model_not_found",
		Message: fmt.Sprintf("the model %q does not exist", Clip(model))}
}

// TooLarge is a 413.
func TooLarge(format string, args ...any) *Error {
	return &Error{Status: 413, Type: TypeInvalid, Code: "request_too_large", Message: fmt.Sprintf(format, args...)}
}

// CodeContext is of ContextExceeded.
const CodeContext = "context_length_exceeded"

// ContextExceeded is a 400 for a prompt of n tokens, or of more, where the model has room for most. It says
// so in OpenAI's words, which clients look for.
func ContextExceeded(param string, most, n int, more bool) *Error {
	what, count := param, strconv.Itoa(n)
	if more {
		count = "more than " + count
	}
	left := ""
	if n == most && !more {
		left = ", which leaves none for the answer"
	}
	e := BadRequest(param, "This model's maximum context length is %d tokens. However, your %s resulted in %s tokens%s. Please reduce the length of the %s.", most, what, count, left, what)
	e.Code = CodeContext
	return e
}

// CodeTooLarge is of AnswerTooLarge.
const CodeTooLarge = "answer_too_large"

// AnswerTooLarge is a 400 for a request whose response would exceed the limit because of param.
func AnswerTooLarge(param, format string, args ...any) *Error {
	e := BadRequest(param, format, args...)
	e.Code = CodeTooLarge
	return e
}

// TooMany is a 429; the HTTP layer adds Retry-After.
func TooMany(format string, args ...any) *Error {
	return &Error{Status: 429, Type: TypeRateLimit, Code: "rate_limit_exceeded", Message: fmt.Sprintf(format, args...)}
}

// Internal is a 500.
func Internal(format string, args ...any) *Error {
	return &Error{Status: 500, Type: TypeServer, Code: "internal_error", Message: fmt.Sprintf(format, args...)}
}

// InvalidOutput is the 500 for a model whose output is not a number.
func InvalidOutput(format string, args ...any) *Error {
	return &Error{Status: 500, Type: TypeServer, Code: "model_output_invalid", Message: fmt.Sprintf(format, args...)}
}

// Upstream is a 502: an engine failed.
func Upstream(format string, args ...any) *Error {
	return &Error{Status: 502, Type: TypeServer, Code: "engine_failed", Message: fmt.Sprintf(format, args...)}
}

// Unavailable is a 503: no pair can serve, or the router sheds load.
func Unavailable(format string, args ...any) *Error {
	return &Error{Status: 503, Type: TypeServer, Code: "unavailable", Message: fmt.Sprintf(format, args...)}
}

// CodeShed is of Shed.
const CodeShed = "shed"

// Shed is a 503 for a request whose first token could not be there in the promised time any more.
func Shed(format string, args ...any) *Error {
	e := Unavailable(format, args...)
	e.Code = CodeShed
	return e
}

// Deadline is a 504.
func Deadline(format string, args ...any) *Error {
	return &Error{Status: 504, Type: TypeServer, Code: "deadline_exceeded", Message: fmt.Sprintf(format, args...)}
}

// Append appends {"error":{…}}.
func (e *Error) Append(dst []byte) []byte {
	dst = appendStr(dst, `{"error":{"message":`, e.Message)
	dst = appendStr(dst, `,"type":`, e.Type)
	dst = append(dst, `,"param":`...)
	dst = appendStringOrNull(dst, e.Param)
	dst = append(dst, `,"code":`...)
	dst = appendStringOrNull(dst, e.Code)
	return append(dst, `}}`...)
}

// ErrorMessage is the message of an engine's error, or the whole body if it has none; clipped.
func ErrorMessage(body []byte) string {
	var b struct {
		Message string
		Error   struct{ Message string }
	}
	_ = json.Unmarshal(body, &b) // what it cannot read stays empty
	return Clip(cmp.Or(b.Error.Message, b.Message, string(body)))
}

// IsError reports whether an event's data is an engine's error.
func IsError(data []byte) bool {
	return bytes.HasPrefix(data, []byte(`{"error":`)) || bytes.HasPrefix(data, []byte(`{"object":"error"`))
}

// Clip bounds foreign text in messages and logs, and keeps its characters whole.
func Clip(s string) string { return clip(s, 200) }

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
