// Package router is the front door: it accepts OpenAI requests, admits them, picks a pair of
// workers, sends each its leg and relays decode's answer. DESIGN.md has the dialects, and
// flight/DESIGN.md the life of a request and when it is tried again.
//
// A router knows no engine, keeps no queue per worker, and never repeats a request once a byte
// has reached the client.
package router
