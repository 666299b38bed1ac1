// Package openai is the public HTTP dialect: request bodies in, response bodies and server-sent
// events out, as the OpenAI API and vLLM define them.
//
// Our own strict JSON reader reads requests: a wrong type or value is an *Error that names the
// field, a duplicate key's last value wins, null means absent, and unknown fields are ignored if
// they are valid JSON. Invalid UTF-8, lone surrogates, NaN, trailing bytes and deep nesting are
// refused.
//
// Scan reads what a router needs, in one pass; ParseCompletion and ParseChat read all that a
// worker needs. Responses are appended to the caller's []byte; a stream chunk allocates nothing.
//
// The package knows no tokenizer, no HTTP server and no engine.
package openai
