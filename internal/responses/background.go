package responses

import "github.com/xpyd/xpyd/internal/openai"

// CodeCancelled is of the error event with which the stream of a response that was cancelled ends.
const CodeCancelled = "response_cancelled"

// Queue appends the events with which the stream of a response in the background begins.
func (a *Answer) Queue(dst []byte) []byte {
	a.out, a.queued = dst, true
	a.stands("response.created", "queued")
	a.stands("response.queued", "queued")
	dst, a.out = a.out, nil
	return dst
}

// Start appends the event that says that it waits no longer.
func (a *Answer) Start(dst []byte) []byte {
	if a.over || a.begun {
		return dst
	}
	a.out = dst
	a.begin()
	dst, a.out = a.out, nil
	return dst
}

// Fail ends the response, unless it is over, and appends the last events.
func (a *Answer) Fail(dst []byte, e *openai.Error) []byte {
	if a.over {
		return dst
	}
	a.out = dst
	a.fail(e)
	dst, a.out = a.out, nil
	return dst
}

// Cancel ends the response with what there is of it, unless it is over, and appends the last event. The API has none
// for this, so it is an error.
func (a *Answer) Cancel(dst []byte) []byte {
	if a.over {
		return dst
	}
	a.over = true
	if it := a.open(); it != nil {
		it.status = "incomplete"
	}
	a.kept(a.appendResponse(nil, "cancelled", nil))
	a.out = dst
	a.event("error")
	a.out = append(a.out, `,"code":"`+CodeCancelled+`","message":"the response was cancelled","param":null`...)
	a.end()
	dst, a.out = a.out, nil
	return dst
}

// Snapshot is the response as it stands: queued or in progress. One that is over has been told to Keep.
func (a *Answer) Snapshot() []byte {
	if a.begun {
		return a.appendResponse(nil, "in_progress", nil)
	}
	return a.appendResponse(nil, "queued", nil)
}

// Status is a kept response's, "" if it has none.
func Status(response []byte) string { return text(response, "status") }

// InBackground reports whether a kept response was made in the background.
func InBackground(response []byte) bool {
	return string(openai.Member(response, "background")) == "true"
}

// Lost is a response whose router ended before it was over.
func Lost(response []byte) []byte {
	return openai.With(response, [2]string{"status", `"failed"`},
		[2]string{"error", `{"code":"server_error","message":"the router that made the response has ended"}`})
}
