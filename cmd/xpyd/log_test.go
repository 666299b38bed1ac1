package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/logbuf"
)

// TestLogIsLimited: whoever causes lines cannot flood the log of a router or a
// worker; access lines are each request's.
func TestLogIsLimited(t *testing.T) {
	var out bytes.Buffer
	log, flush := newLogger(&out, "info", "text")
	for i := range 1000 {
		log.Warn("attempt failed", "request_id", i)
		log.Info("request", "request_id", i)
	}
	flush()
	text := out.String()
	if a, b := strings.Count(text, `msg="attempt failed" `), strings.Count(text, "msg=request "); a != logbuf.Burst || b != 1000 {
		t.Errorf("%d and %d lines", a, b)
	}
	if !strings.Contains(text, "attempt failed … and 970 more") {
		t.Error("nothing says how many were left out")
	}
}
