// Package openai is the public HTTP dialect: request bodies in, response
// bodies and server-sent events out, as the OpenAI API and vLLM define them.
//
// Requests are read by a strict JSON reader of our own: a wrong type or an
// out-of-range value is an *Error that names the field, a duplicate key's last
// value wins, unknown fields are ignored (they must still be valid JSON), and
// null means absent. Invalid UTF-8, lone surrogates, NaN, trailing bytes and
// deep nesting are refused.
//
// Scan reads only what a router needs, in one pass and without building
// anything; ParseCompletion and ParseChat read everything a worker needs.
// Responses are appended to the caller's []byte; a stream chunk allocates
// nothing.
//
// The package knows no tokenizer, no HTTP server and no engine.
package openai
