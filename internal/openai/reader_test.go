package openai_test

import (
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/jsonscan"
	"github.com/xpyd/xpyd/internal/openai"
)

// TestRefusal: an engine's error keeps what it says, and has a status and a type where it says none.
func TestRefusal(t *testing.T) {
	f := func(status int, body string, want openai.Error) {
		t.Helper()
		if got := *openai.Refusal(status, []byte(body)); got != want {
			t.Errorf("%d %s: %+v, want %+v", status, body, got, want)
		}
	}
	f(400, `{"error":{"message":"no","type":"invalid_request_error","param":"n","code":"c"}}`, openai.Error{Status: 400, Message: "no", Type: openai.TypeInvalid, Param: "n", Code: "c"})
	f(404, `{"object":"error","message":"no","type":"NotFoundError","param":null,"code":404}`, openai.Error{Status: 404, Message: "no", Type: openai.TypeInvalid, Code: "404"})
	f(401, `{"error":"no"}`, openai.Error{Status: 401, Message: `{"error":"no"}`, Type: openai.TypeAuth})
	f(429, `slow down`, openai.Error{Status: 429, Message: "slow down", Type: openai.TypeRateLimit})
	f(500, `{"error":{"message":"a\nb","type":"x"}}`, openai.Error{Status: 500, Message: "a\nb", Type: openai.TypeServer})
	event := func(kind, code string, status int, want string) {
		t.Helper()
		f(0, `{"error":{"message":"no","type":"`+kind+`","code":`+code+`}}`, openai.Error{Status: status, Message: "no", Type: want, Code: strings.Trim(code, `"`)})
	}
	event(openai.TypeServer, `"unavailable"`, 503, openai.TypeServer)
	event(openai.TypeServer, `"shed"`, 503, openai.TypeServer)
	event(openai.TypeServer, `"deadline_exceeded"`, 504, openai.TypeServer)
	event(openai.TypeServer, `"engine_failed"`, 502, openai.TypeServer)
	event(openai.TypeServer, `"other"`, 500, openai.TypeServer)
	event(openai.TypeAuth, `"x12"`, 401, openai.TypeAuth)
	event(openai.TypeRateLimit, `"x12"`, 429, openai.TypeRateLimit)
	event(openai.TypeInvalid, `"x12"`, 400, openai.TypeInvalid)
	event("BadRequestError", `400`, 400, openai.TypeInvalid)
	event("InternalServerError", `500`, 500, openai.TypeServer)
}

// TestReader: fields are read as strictly as our own; the first refusal sticks.
func TestReader(t *testing.T) {
	r := openai.NewReader([]byte(`{"s":"a\u00e4","n":null,"b":true,"i":3,"f":1.5,"o":{"x":[1]},"l":["q",2]}`))
	for r.Next() == jsonscan.Key {
		switch string(r.Decoded()) {
		case "s":
			if got := string(r.Quoted("s")); got != `a\u00e4` {
				t.Error(got)
			}
		case "n":
			if r.Given() != nil {
				t.Error("null is given")
			}
		case "b":
			if !r.Bool("b", false) {
				t.Error("b")
			}
		case "i":
			if n, given := r.Count("i", 1); n != 3 || !given {
				t.Error(n, given)
			}
		case "f":
			if got := string(r.Number("f")); got != "1.5" {
				t.Error(got)
			}
		case "o":
			if got := string(r.Of("o", jsonscan.Object, "an object")); got != `{"x":[1]}` {
				t.Error(got)
			}
		case "l":
			if r.Is("l", jsonscan.Array, "a list") && r.Item() {
				if got := r.Str("l"); got != "q" || !r.Item() || r.Str("l") != "" {
					t.Error(got)
				}
			}
		}
	}
	if err := r.Fault(); err == nil || err.Param != "l" || err.Message != "l must be a string, not a number" {
		t.Error(err)
	}
	r = openai.NewReader([]byte(`{"a":1,"b":2}`))
	for r.Next() == jsonscan.Key {
		if r.Of("a", jsonscan.String, "a string") != nil {
			t.Error("a number is no string")
		}
	}
	r.Refuse("b", "later")
	if err := r.Fault(); err == nil || err.Message != "a must be a string, not a number" {
		t.Error(err)
	}
	r = openai.NewListReader([]byte(`[1,2]`))
	n := 0
	for r.Item() {
		n++
		r.Skip()
	}
	if err := r.Fault(); n != 2 || err != nil {
		t.Error(n, err)
	}
}
