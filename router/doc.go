// Package router is the front door: it accepts OpenAI requests, admits them, picks a pair of
// workers, dispatches both legs at once and relays decode's answer. DESIGN.md has the life of
// a request, the retry rules and the goroutines.
//
// A router knows no tokenizer and no engine, keeps no queue per worker, and never repeats a
// request once a byte has reached the client.
package router
