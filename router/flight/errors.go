package flight

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

// Why a request or a leg ends.
var (
	errClientGone = errors.New("the client left")
	errDeadline   = errors.New("the request's deadline passed")
	ErrShutdown   = errors.New("the router is shutting down")
	errOver       = errors.New("the request is over")
	errStalled    = errors.New("the client stopped reading")
	errCancelled  = errors.New("the response was cancelled")
)

// statusClientGone is nginx's 499: logged, never sent.
const statusClientGone = 499

// failure is how an attempt ended without an answer.
type failure struct {
	by      *leg           // which failed first
	outcome ticket.Outcome // Dead for a broken connection
	reason  string         // label of the retry metric; see retryReasons
	err     error
	status  int // that an engine answered instead, if it did
	retry   bool
	exclude []string // ids that must not be tried again
	avoid   []string // ids to try again only when no others are left
	holds   string   // a decode worker that keeps what has arrived of the prompt, and is not at fault
	relay   *answer  // the engine's own words for the client, who is at fault; or see lastResort
	api     *openai.Error
}

func (f *failure) Error() string {
	return fmt.Sprintf("%s worker %s: %v", f.by.role, f.by.inst.ID, f.err)
}

// lastResort reports whether the failure is an engine's 5xx that the client gets unless
// the hedged attempt does better.
func (f *failure) lastResort() bool { return f.relay != nil && f.relay.status >= 500 }

// hearsay reports whether the failure is one worker's report that its partner is gone: the
// partner's own leg knows better.
func (f *failure) hearsay() bool {
	return f.reason == reasonOutcome+string(ticket.Cancelled) || f.reason == reasonOutcome+string(ticket.Dead)
}

// budgeted reports whether another attempt counts against the retry budget, which keeps
// overload from feeding itself. What a lost worker had in flight does not: it is bounded by
// itself, and is repeated wherever another pair lives.
func (f *failure) budgeted() bool {
	return f.outcome != ticket.Dead && f.outcome != ticket.Cancelled
}

// Reasons of retries and cancelled legs.
const (
	reasonTransport = "transport"
	reasonTimeout   = "timeout"
	reasonDead      = "dead"
	reasonSilent    = "silent"   // see silent.go
	reasonError     = "error"    // of a stream: its worker said what went wrong
	reasonDrain     = "drain"    // of takeovers, as the next two
	reasonBlocks    = "shortage" // its worker is short of blocks
	reasonBalance   = "balance"  // its worker is slower than others
	reasonOutcome   = "outcome_" // with the outcome
	reasonStatus    = "status"
	reasonShortage  = "shortage" // of the router's own; see shortage
)

// retryReasons is the label set of the retry metric.
var retryReasons = []string{
	reasonTransport, reasonTimeout, reasonDead, reasonSilent, reasonStatus, reasonShortage,
	reasonOutcome + string(ticket.NoSpace), reasonOutcome + string(ticket.Late), reasonOutcome + string(ticket.Dead),
	reasonOutcome + string(ticket.Incompatible), reasonOutcome + string(ticket.Corrupt), reasonOutcome + string(ticket.Cancelled),
}

// httpError is the answer when all attempts have failed.
func (f *failure) httpError() *openai.Error {
	switch {
	case f.api != nil:
		return f.api
	case f.outcome == ticket.NoSpace || f.outcome == ticket.Incompatible:
		return openai.Unavailable("%s", f.Error())
	case f.outcome == ticket.Late || f.reason == reasonTimeout:
		return openai.Deadline("%s", f.Error())
	}
	return openai.Upstream("%s", f.Error())
}

// tooLarge tells the client which field makes its answer too large.
func tooLarge(e *h1.LargeError, top *openai.Top) *openai.Error {
	field := largest(top)
	if top.Stream {
		return openai.AnswerTooLarge(field, "%v: lower %s", e, field)
	}
	return openai.AnswerTooLarge(field, "%v: lower %s, or ask for a stream", e, field)
}

// errLargeAnswer refuses a request before it is sent.
var errLargeAnswer = errors.New("its answer would be too large")

// largest is the field that most enlarges the answer, as far as can be told without a
// tokenizer.
func largest(top *openai.Top) string {
	switch {
	case top.PromptLogprobs:
		return "prompt_logprobs"
	case top.Logprobs && top.Messages:
		return "top_logprobs"
	case top.Logprobs:
		return "logprobs"
	case top.N*top.Prompts > 1:
		return "n"
	}
	return "max_tokens"
}

// contextError is the answer to a request that was ended.
func contextError(ctx context.Context) *openai.Error {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errClientGone) || errors.Is(cause, errStalled) || errors.Is(cause, errCancelled):
		return &openai.Error{Status: statusClientGone, Type: openai.TypeInvalid, Code: "client_gone", Message: cause.Error()}
	case errors.Is(cause, ErrShutdown):
		return openai.Unavailable("%v", cause)
	default:
		return openai.Deadline("%v", errDeadline)
	}
}

func pickError(err error, model string) *openai.Error {
	if errors.Is(err, pick.ErrNoModel) {
		return openai.ModelNotFound(model)
	}
	return openai.Unavailable("%v", err)
}

// Headers of the public listener, besides the dialect's.
const (
	headerDecode   = "x-xpyd-decode"
	headerFallback = "x-xpyd-fallback" // why decode served a request alone
	headerLocal    = "x-xpyd-local"    // why decode served it alone though it could be split
	headerExplain  = "x-xpyd-explain"
	headerTimeout  = "x-request-timeout-ms"
	headerTakeover = "x-xpyd-takeover" // "0": no other pair goes on with a stream that breaks
)

func isEventStream(contentType string) bool {
	return strings.HasPrefix(contentType, "text/event-stream")
}
func isJSON(contentType string) bool { return strings.HasPrefix(contentType, "application/json") }
