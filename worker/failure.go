package worker

import (
	"errors"

	"github.com/xpyd/xpyd/decode"
	"github.com/xpyd/xpyd/engine"
	"github.com/xpyd/xpyd/internal/openai"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"github.com/xpyd/xpyd/prefill"
)

// failure is an API error together with the outcome that a router acts on.
type failure struct {
	*openai.Error
	outcome ticket.Outcome
}

// badRequest is a failure of the client: its request is as wrong for any other worker.
func badRequest(param, format string, args ...any) *failure {
	return &failure{Error: openai.BadRequest(param, format, args...)}
}

// engineFailure is what the engine refused, or ended with.
func engineFailure(err error) *failure {
	var bad *engine.RequestError
	var long *engine.TooLongError
	var spoilt *engine.OutputError
	switch {
	case errors.As(err, &bad):
		return &failure{openai.BadRequest(bad.Field, "%s", bad.Msg), ticket.Refused}
	case errors.As(err, &long):
		return &failure{openai.BadRequest("prompt", "%v", err), ticket.Refused}
	case errors.As(err, &spoilt):
		return &failure{openai.InvalidOutput("%v", err), ticket.Invalid}
	case errors.Is(err, engine.ErrQueueFull):
		return &failure{openai.Unavailable("%v", err), ticket.NoSpace}
	case errors.Is(err, engine.ErrClosed):
		return closing()
	}
	return &failure{openai.Upstream("%v", err), ticket.Dead}
}

// fetchFailure is why decode has not got a prompt's KV from prefill.
func fetchFailure(err error) *failure {
	var e *decode.Error
	if !errors.As(err, &e) {
		return &failure{openai.Upstream("%v", err), ticket.Dead}
	}
	switch e.Outcome {
	case ticket.NoSpace:
		return &failure{openai.Unavailable("%v", err), e.Outcome}
	case ticket.Late:
		return &failure{openai.Deadline("%v", err), e.Outcome}
	case ticket.Invalid: // of prefill, whose own leg says so
		return &failure{openai.InvalidOutput("%v", err), ticket.Refused}
	}
	return &failure{openai.Upstream("%v", err), e.Outcome}
}

// keepFailure is why prefill does not keep a prompt for a foreign proxy's decode.
func keepFailure(err error) *failure {
	switch {
	case errors.Is(err, prefill.ErrLeaseExists):
		return badRequest(fieldTransfer, "transfer_id: %v", err)
	case errors.Is(err, prefill.ErrTooManyLeases):
		return &failure{openai.Unavailable("%v", err), ticket.NoSpace}
	case errors.Is(err, prefill.ErrClaimGone):
		return &failure{openai.Upstream("%v", err), ticket.Cancelled}
	}
	return engineFailure(err)
}

// memoryFailure is the answer of who got no share.
func memoryFailure(err error) *failure {
	switch {
	case errors.Is(err, errMemory), errors.Is(err, errWaiters):
		return &failure{openai.Unavailable("%v", err), ticket.NoSpace}
	case errors.Is(err, errClosing):
		return closing()
	}
	return &failure{openai.Upstream("%v", err), ticket.Cancelled}
}

func closing() *failure { return &failure{openai.Unavailable("%v", errClosing), ticket.NoSpace} }
