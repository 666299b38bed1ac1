package flight

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/router/h1"
	"github.com/xpyd/xpyd/router/pick"
)

func twoLegs() (p, d *leg) {
	return &leg{role: fleet.Prefill, inst: &fleet.Instance{ID: "p0"}}, &leg{role: fleet.Decode, inst: &fleet.Instance{ID: "d0"}}
}

// TestHTTPErrors: what the client is told when all attempts have failed.
func TestHTTPErrors(t *testing.T) {
	p, _ := twoLegs()
	for _, c := range []struct {
		f                       failure
		status                  int
		last, hearsay, budgeted bool
	}{
		{f: failure{outcome: ticket.NoSpace}, status: 503, budgeted: true},
		{f: failure{outcome: ticket.Incompatible}, status: 503, budgeted: true},
		{f: failure{outcome: ticket.Late}, status: 504, budgeted: true},
		{f: failure{outcome: ticket.Corrupt, reason: reasonTimeout}, status: 504, budgeted: true},
		{f: failure{outcome: ticket.Dead}, status: 502},
		{f: failure{outcome: ticket.Dead, reason: reasonOutcome + "dead"}, status: 502, hearsay: true},
		{f: failure{outcome: ticket.Cancelled, reason: reasonOutcome + "cancelled"}, status: 502, hearsay: true},
		{f: failure{outcome: ticket.NoSpace, api: openai.BadRequest("n", "x")}, status: 400, budgeted: true},
		{f: failure{relay: &answer{status: 499}}, status: 502, budgeted: true},
		{f: failure{relay: &answer{status: 500}}, status: 502, budgeted: true, last: true},
	} {
		c.f.by, c.f.err = p, errors.New("broke")
		err := c.f.httpError()
		if err.Status != c.status || c.f.lastResort() != c.last || c.f.hearsay() != c.hearsay || c.f.budgeted() != c.budgeted {
			t.Errorf("%+v: %v, last resort %t, hearsay %t, budgeted %t", c.f, err, c.f.lastResort(), c.f.hearsay(), c.f.budgeted())
		}
		if c.f.api == nil && err.Message != "prefill worker p0: broke" {
			t.Errorf("%q", err.Message)
		}
	}
	ended := func(why error) context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(why)
		return ctx
	}
	for _, c := range []struct {
		err    *openai.Error
		status int
		code   string
	}{
		{contextError(ended(errClientGone)), 499, "client_gone"}, {contextError(ended(fmt.Errorf("x: %w", errStalled))), 499, "client_gone"}, {contextError(ended(ErrShutdown)), 503, "unavailable"},
		{contextError(ended(context.DeadlineExceeded)), 504, "deadline_exceeded"}, {contextError(ended(errDeadline)), 504, "deadline_exceeded"},
		{pickError(fmt.Errorf("x: %w", pick.ErrNoModel), "m"), 404, "model_not_found"}, {pickError(pick.ErrNoPair, "m"), 503, "unavailable"},
		{tooLarge(&h1.LargeError{What: "an answer", Limit: 5}, &openai.Top{}), 400, "answer_too_large"},
	} {
		if c.err.Status != c.status || c.err.Code != c.code {
			t.Errorf("%v, code %s, want %d %s", c.err, c.err.Code, c.status, c.code)
		}
	}
	for _, stream := range []bool{false, true} {
		if got := tooLarge(&h1.LargeError{}, &openai.Top{Stream: stream}); strings.Contains(got.Message, "ask for a stream") == stream || got.Param != "max_tokens" {
			t.Errorf("stream %t: %v", stream, got)
		}
	}
	for want, top := range map[string]openai.Top{
		"prompt_logprobs": {PromptLogprobs: true, Logprobs: true, N: 2, Prompts: 1}, "top_logprobs": {Logprobs: true, Messages: true, N: 2, Prompts: 1}, "logprobs": {Logprobs: true, N: 2, Prompts: 1},
		"n": {N: 2, Prompts: 1}, "max_tokens": {N: 1, Prompts: 1, Messages: true},
	} {
		if got := largest(&top); got != want {
			t.Errorf("%+v: lower %s, want %s", top, got, want)
		}
	}
	if got := largest(&openai.Top{N: 1, Prompts: 2}); got != "n" {
		t.Errorf("two prompts: lower %s", got)
	}
}

// TestReported: what a worker's word of an outcome means for where the request is tried next.
func TestReported(t *testing.T) {
	p, d := twoLegs()
	a := &attempt{p: p, d: d}
	for _, c := range []struct {
		by, partner *leg
		outcome     ticket.Outcome
		retry       bool
		avoid       string
		holds       string
		reason      string
	}{
		{p, d, ticket.NoSpace, true, "p0", "", "outcome_no_space"},
		{d, p, ticket.NoSpace, true, "d0", "", "outcome_no_space"},
		{p, d, ticket.Late, true, "d0 p0", "", "outcome_late"},
		{d, p, ticket.Corrupt, true, "p0 d0", "", "outcome_corrupt"},
		{d, p, ticket.Incompatible, true, "p0 d0", "", "outcome_incompatible"},
		{d, p, ticket.Dead, true, "p0 p0", "d0", "outcome_dead"},
		{p, d, ticket.Dead, true, "d0 d0 p0", "", "outcome_dead"},
		{d, p, ticket.Cancelled, true, "p0 p0 d0", "", "outcome_cancelled"},
		{p, d, ticket.Refused, false, "d0 p0", "", reasonStatus},
		{p, d, ticket.Shed, false, "", "", reasonStatus},
		{p, d, "nonsense", false, "d0 p0", "", reasonStatus},
	} {
		f := a.reported(c.by, c.partner, c.outcome, "why")
		if f.by != c.by || f.outcome != c.outcome || f.retry != c.retry || strings.Join(f.avoid, " ") != c.avoid || f.holds != c.holds || f.reason != c.reason || f.err.Error() != string(c.outcome)+": why" {
			t.Errorf("%s by %s: %+v, %v", c.outcome, c.by.role, f, f.err)
		}
	}
	for _, c := range [][2]string{{"", "no reason given"}, {strings.Repeat("x", maxReason), strings.Repeat("x", maxReason)}, {strings.Repeat("x", maxReason-1) + "ä", strings.Repeat("x", maxReason-1) + "…"}} {
		if got := a.reported(p, d, ticket.Late, c[0]).err.Error(); got != "late: "+c[1] {
			t.Errorf("a reason of %d bytes: %d", len(c[0]), len(got))
		}
	}
	if f := shortage(d, errors.New("x")); f.by != d || f.outcome != ticket.NoSpace || !f.retry || f.reason != reasonShortage || !slices.Equal(f.avoid, []string{"d0"}) || len(f.exclude) > 0 {
		t.Errorf("%+v", f)
	}
}

// TestHosts: where engines may fetch from for a client.
func TestHosts(t *testing.T) {
	for h, ok := range map[string]bool{"*": true, "h": true, "h:80": true, "*.example.com": true, "*.h:80": true, "": false, "*.": false, "**": false, "a*": false, "*.*": false, "H": false,
		"h/x": false, "h x": false, "u@h": false, "h?": false, "h#": false} {
		if validHost(h) != ok {
			t.Errorf("%q is a host: %t", h, !ok)
		}
	}
	list := hosts{"a.example", "b.example:8080", "*.c.example"}
	for u, ok := range map[string]bool{
		"http://a.example/x": true, "https://A.EXAMPLE:99/": true, "http://b.example:8080": true, "http://b.example": false, "http://b.example:80": false, "http://x.c.example": true, "http://x.y.c.example:1": true,
		"http://c.example": false, "http://xc.example": false, "http://d.example": false, "ftp://a.example": false, "data:x": false, "http://": false, "http://u@a.example": false, "http://a.example\\@d.example": false, "http://%zz": false, "": false,
	} {
		err := list.check("messages", "http://a.example", u)
		if (err == nil) != ok || err != nil && (err.Status != 400 || err.Param != "messages" || strings.Contains(err.Message, "%!")) {
			t.Errorf("%q: %v", u, err)
		}
	}
	if err := (hosts{"*"}).check("tools", "http://any.where:1/x"); err != nil {
		t.Error(err)
	}
	if err := (hosts{}).check("tools"); err != nil {
		t.Error(err)
	}
}

// TestPolicyBounds: each setting, just within its bounds and just outside.
func TestPolicyBounds(t *testing.T) {
	f := func(key string, change func(*Policy)) {
		t.Helper()
		c := DefaultPolicy()
		change(&c)
		err := c.Validate()
		var e *config.KeyError
		if (err == nil) != (key == "") || err != nil && (!errors.As(err, &e) || e.Key != key || strings.Contains(err.Error(), "%!")) {
			t.Errorf("%v, want %q refused", err, key)
		}
	}
	f("", func(*Policy) {})
	f("api_keys[1]", func(c *Policy) { c.APIKeys = []string{"x", ""} })
	f("media_hosts[1]", func(c *Policy) { c.MediaHosts = []string{"*", "H"} })
	f("", func(c *Policy) { c.TenantHeader = "x-tenant" })
	for _, h := range []string{"Authorization", "a b", "a:", "a\n", "a\r"} {
		f("tenant_header", func(c *Policy) { c.TenantHeader = h })
	}
	f("", func(c *Policy) { c.RetryMin, c.RetryBurst, c.RetryRatio, c.History = 0, 0, 0, 0 })
	f("", func(c *Policy) {
		c.RetryMin, c.RetryRatio, c.MaxResponseBytes, c.Attempts, c.DecodeSilence = 1e6, 1, 1024, 1, 1
	})
	f("", func(c *Policy) { c.TakeoverReplay = true })
	f("takeover_replay", func(c *Policy) { c.Takeover, c.TakeoverReplay = false, true })
	for _, v := range []float64{-0.1, 1e6 + 1, math.NaN()} {
		f("retry_min", func(c *Policy) { c.RetryMin = v })
	}
	f("max_response_bytes", func(c *Policy) { c.MaxResponseBytes = 1023 })
	f("attempts", func(c *Policy) { c.Attempts = 0 })
	f("retry_ratio", func(c *Policy) { c.RetryRatio = 1.1 })
	f("retry_burst", func(c *Policy) { c.RetryBurst = -1 })
	f("history", func(c *Policy) { c.History = -1 })
	f("decode_silence", func(c *Policy) { c.DecodeSilence = 0 })
	f("balance.interval", func(c *Policy) { c.Balance.Interval = time.Second - 1 })
	f("balance.windows", func(c *Policy) { c.Balance.Windows = 0 })
	for _, v := range []float64{0, 1.3, 101, math.NaN()} {
		f("balance.above", func(c *Policy) { c.Balance.Above, c.Balance.Below = v, 1.3 })
	}
	for _, v := range []float64{0.9, 101, math.NaN()} {
		f("balance.below", func(c *Policy) { c.Balance.Below = v })
	}
	for _, v := range []float64{0, 1.1, math.NaN()} {
		f("balance.max_share", func(c *Policy) { c.Balance.MaxShare = v })
	}
	f("", func(c *Policy) {
		c.Balance = Balance{Interval: time.Second, Windows: 1, Below: 1, Above: 1.001, MaxShare: 1}
	})
	f("hedge.delay", func(c *Policy) { c.Hedge.Delay = -1 })
	f("hedge.ratio", func(c *Policy) { c.Hedge.Ratio = -0.1 })
	f("hedge.burst", func(c *Policy) { c.Hedge.Burst = -1 })
	f("", func(c *Policy) {
		c.Limits.MaxInFlight, c.Limits.MaxQueue, c.Limits.MaxQueueBytes, c.Limits.QueueWait, c.Limits.PairWait, c.Limits.RequestTimeout = 1, 0, 0, 1, 0, 1
		c.Limits.PriorityWeights = Weights{0.001, 1e6, 1}
	})
	f("limits.max_in_flight", func(c *Policy) { c.Limits.MaxInFlight = 0 })
	f("limits.max_queue", func(c *Policy) { c.Limits.MaxQueue = -1 })
	f("limits.max_queue_bytes", func(c *Policy) { c.Limits.MaxQueueBytes = -1 })
	f("limits.queue_wait", func(c *Policy) { c.Limits.QueueWait = 0 })
	f("limits.pair_wait", func(c *Policy) { c.Limits.PairWait = -1 })
	f("limits.request_timeout", func(c *Policy) { c.Limits.RequestTimeout = 0 })
	for _, w := range []Weights{{0.0009, 1, 1}, {1, 1e6 + 1, 1}, {1, 1, math.NaN()}, {1, 1, 0}} {
		f("limits.priority_weights", func(c *Policy) { c.Limits.PriorityWeights = w })
	}
}

// TestLifetime: a client may shorten its request's life, and not lengthen it.
func TestLifetime(t *testing.T) {
	for header, want := range map[string]time.Duration{"": time.Second, "1": time.Millisecond, "1000": time.Second, "999": 999 * time.Millisecond, "1001": time.Second, "9223372036854775807": time.Second, "0": 0, "-1": 0, "x": 0, "1.5": 0, "9223372036854775808": 0} {
		got, err := lifetime([]byte(header), time.Second)
		if got != want || (err == nil) != (want > 0) || err != nil && (err.Status != 400 || err.Param != headerTimeout || strings.Contains(err.Message, "%!")) {
			t.Errorf("%q: %v, %v", header, got, err)
		}
	}
	if got, err := lifetime([]byte("2"), 1500*time.Microsecond); got != 1500*time.Microsecond || err != nil {
		t.Errorf("%v, %v", got, err)
	}
	for d, want := range map[time.Duration]string{0: "0.000", -1: "0.000", 999 * time.Nanosecond: "0.000", 1234 * time.Microsecond: "1.234", 50 * time.Microsecond: "0.050", time.Minute + 7*time.Microsecond: "60000.007"} {
		if got := string(appendMS([]byte("x"), d)); got != "x"+want {
			t.Errorf("%v is %s", d, got)
		}
	}
	if promptField("/v1/chat/completions") != "messages" || promptField("/v1/completions") != "prompt" {
		t.Error("the prompt is elsewhere")
	}
}

// TestEventParts: the data of an event, and what makes it an error.
func TestEventParts(t *testing.T) {
	for event, want := range map[string]string{"data: x\n\n": "x\n\n", "data:x": "x", "data:  x": " x", "event: a\ndata: x": "x", "event: a\rdata: x": "x", "event: a\r\ndata: x": "x", ": c\n: d\ndata:{}": "{}", "event: a": "", "event: a\n": "", "": "", "xdata: y": ""} {
		if got := string(dataOf([]byte(event))); got != want {
			t.Errorf("%q: %q, want %q", event, got, want)
		}
	}
	for event, want := range map[string]bool{`data: {"error":{}}`: true, `data:{"error":1}`: true, `data: {"object":"error"}`: true, "event: error\ndata: x": true, "event:error\ndata: x": true,
		`data: {"id":1,"error":2}`: false, `data: {"object":"chunk"}`: false, "event: other\ndata: {}": false, "": false} {
		if got := isError([]byte(event)); got != want {
			t.Errorf("%q is an error: %t", event, got)
		}
	}
	for in, want := range map[string]string{"": "", "\r\n\n": "", ": c\n\n": "", ": c": "", ": c\ndata": "data", "\n: a\r\n: b\r\nx": "x", "x: y": "x: y"} {
		if got := string(skipComments([]byte(in))); got != want {
			t.Errorf("%q without comments is %q", in, got)
		}
	}
	for body, want := range map[string]string{`{"error":{"message":"m"}}`: "m", `{"error":{"message":""}}`: `{"error":{"message":""}}`, `{"error":"x"}`: `{"error":"x"}`, "x": "x", "": "", strings.Repeat("y", 201): strings.Repeat("y", 200) + "…"} {
		if got := openai.ErrorMessage([]byte(body)); got != want {
			t.Errorf("%q says %q", body, got)
		}
	}
	if !isEventStream("text/event-stream; charset=utf-8") || isEventStream("application/json") || !isJSON("application/json; x") || isJSON("text/plain") {
		t.Error("content types")
	}
}
