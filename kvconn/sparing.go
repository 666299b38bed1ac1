package kvconn

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Lines of one kind that are logged within a while; those beyond are counted.
const (
	sparingLines = 8
	sparingWhile = 10 * time.Second
)

// sparing limits log lines that peers can cause at will.
type sparing struct {
	log *slog.Logger

	mu    sync.Mutex
	since time.Time // of the while
	lines int       // logged in it
	more  int       // kept back since the last line
}

func (s *sparing) Log(ctx context.Context, level slog.Level, msg string, args ...any) {
	s.mu.Lock()
	if now := time.Now(); now.Sub(s.since) >= sparingWhile {
		s.since, s.lines = now, 0
	}
	if s.lines++; s.lines > sparingLines {
		s.more++
		s.mu.Unlock()
		return
	}
	more := s.more
	s.more = 0
	s.mu.Unlock()
	if more > 0 {
		args = append(args, "more_like_it", more)
	}
	s.log.Log(ctx, level, msg, args...)
}
