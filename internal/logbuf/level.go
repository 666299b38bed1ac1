package logbuf

import "log/slog"

// Levels are the names of the levels that a log may have.
func Levels() []string { return []string{"debug", "info", "warn", "error"} }

// ParseLevel reads one of Levels. slog's own reader also takes "info+2".
func ParseLevel(name string) (level slog.Level, ok bool) {
	for i, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if Levels()[i] == name {
			return l, true
		}
	}
	return 0, false
}
