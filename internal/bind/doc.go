// Package bind makes what binds an answer to what its request asks for (engine.Guide): grammars,
// compiled for the model's vocabulary, behind the model's reasoning and the marks of its format.
//
//	b := bind.New(vocabulary, …)
//	spec, err := b.Text(constraint, thinks)     // or b.Calls(tools, …)
//	guide, err := b.Guide(ctx, spec)
//
// A Spec (handoff.Guide) is all that another worker with the same tokenizer needs to stand at the same
// place behind the same tokens: it travels in tickets, and a stream that goes on elsewhere brings its
// request again.
//
// An answer is a path through stages: reasoning, where anything but an end may come until its mark
// (reason.go); a mark or the begin of a call, as the tokens that the tokenizer makes of it; text that a
// grammar matches; what closes a call; and an end (script.go). Of strict tools that may be called it is
// free, until what begins a call has come, and behind the call (trigger.go).
package bind
