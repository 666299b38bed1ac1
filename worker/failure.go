package worker

import (
	"errors"
	"strconv"

	"github.com/valyala/fasthttp"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
	"github.com/xpyd/xpyd/router/h1"
)

// failure is an API error with the outcome that a router acts on.
type failure struct {
	api     *openai.Error
	outcome ticket.Outcome
}

func (f *failure) Error() string { return f.api.Error() }
func (f *failure) Unwrap() error { return f.api }

// failed is the failure of err with an outcome, not Refused.
func failed(o ticket.Outcome, err error) *failure {
	api := openai.Upstream
	switch o {
	case ticket.NoSpace:
		api = openai.Unavailable
	case ticket.Late:
		api = openai.Deadline
	case ticket.Invalid:
		api = openai.InvalidOutput
	case ticket.Shed:
		api = openai.Shed
	}
	return &failure{api("%v", err), o}
}

// elsewhere reports whether another worker may do better.
func (f *failure) elsewhere() bool {
	return f.outcome != ticket.Refused && f.outcome != ticket.Invalid && f.outcome != ticket.Shed
}

// closing is the answer while the worker shuts down: another worker may serve the request.
func closing() *failure { return failed(ticket.NoSpace, errClosing) }

// writeError answers with a *failure or an *openai.Error; any other error is a 500.
func writeError(ctx *fasthttp.RequestCtx, err error) {
	if f := (*failure)(nil); errors.As(err, &f) && f.api.Status >= 500 {
		ctx.Response.Header.Set(ticket.HeaderOutcome, string(f.outcome))
	}
	var api *openai.Error
	if !errors.As(err, &api) {
		api = openai.Internal("%v", err)
	}
	if s := max(api.RetryAfter, h1.RetryAfter(api.Status)); s > 0 {
		ctx.Response.Header.Set("Retry-After", strconv.Itoa(s))
	}
	writeJSON(ctx, api.Status, api.Append(nil))
}

// codeDeadEnd is of an answer that no token can continue as the request binds it.
const codeDeadEnd = "unsatisfiable_constraint"

func engineFailure(err error) *failure {
	var bad *engine.RequestError
	var long *engine.TooLongError
	var spoilt *engine.OutputError
	var dead *engine.GuideError
	switch {
	case errors.As(err, &bad):
		return &failure{openai.BadRequest(bad.Field, "%s", bad.Msg), ticket.Refused}
	case errors.As(err, &long):
		return &failure{openai.BadRequest("prompt", "%v", err), ticket.Refused}
	case errors.As(err, &dead):
		return &failure{openai.BadRequest("", "%v", err).WithStatus(400, codeDeadEnd), ticket.Refused}
	case errors.As(err, &spoilt):
		return failed(ticket.Invalid, err)
	case errors.Is(err, engine.ErrLate):
		return failed(ticket.Shed, err)
	case errors.Is(err, engine.ErrQueueFull):
		return failed(ticket.NoSpace, err)
	case errors.Is(err, engine.ErrClosed):
		return closing()
	}
	return failed(ticket.Dead, err)
}

// fetchFailure maps an error of decode.Fetch.
func fetchFailure(err error) *failure {
	var e *decode.Error
	if !errors.As(err, &e) {
		return failed(ticket.Dead, err)
	}
	f := failed(e.Outcome, err)
	if e.Outcome == ticket.Invalid { // the answer of prefill's own leg has that outcome
		f.outcome = ticket.Refused
	}
	return f
}

// keepFailure maps an error of prefill.Keep.
func keepFailure(err error) error {
	switch {
	case errors.Is(err, prefill.ErrLeaseExists):
		return openai.BadRequest(fieldTransfer, "transfer_id: %v", err)
	case errors.Is(err, prefill.ErrTooManyLeases):
		return failed(ticket.NoSpace, err)
	case errors.Is(err, prefill.ErrClaimGone):
		return failed(ticket.Cancelled, err)
	}
	return engineFailure(err)
}

func memoryFailure(err error) *failure {
	switch {
	case errors.Is(err, errMemory), errors.Is(err, errWaiters):
		return failed(ticket.NoSpace, err)
	case errors.Is(err, errClosing):
		return closing()
	}
	return failed(ticket.Cancelled, err)
}
