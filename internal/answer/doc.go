// Package answer reads what a model writes: its reasoning, its calls of tools, and what is left, the
// answer's text. Text goes in, in pieces of any size; events come out.
//
//	p := answer.New(answer.ToolFormat("hermes"), answer.ThinkFormat("qwen3"), answer.Options{Tools: tools})
//	for … {
//		events := p.Feed(text)
//	}
//	events := p.Flush()
//
// A format is a row of a table (formats.go, thinks.go), not a program: its marks, and which of four
// kinds of call stands between them: JSON, a name and JSON, tags (keys and values), or Python. Only
// gpt-oss's channels (harmony.go) are a kind of their own, as they mark everything.
//
// A format of marks believes them: what they enclose is a call even of a tool that was not offered, so
// that whoever runs it can tell the model. A call without a mark must be of a tool that was.
//
// How the text is cut into pieces changes where pieces of content and arguments end, and nothing
// else. Each byte is looked at a bounded number of times.
//
// A stream (Options.Whole false) begins a call as soon as its name is known and its arguments begin;
// these follow as they come, so a call that then turns out to be broken stays one. Of an answer that is
// sent whole, a call is given only once it is complete and valid (gpt-oss's excepted, which nothing but
// the end of the answer ends). Whatever is no call is content,
// marks included: no text is lost but marks, whitespace beside calls, and calls after the first where
// only one was wanted.
//
// At most maxHold bytes of a stream are held back until it is clear what they are.
//
// The package knows no tokenizer and no HTTP.
package answer
