package supervise

import (
	"bytes"
	"io"
	"sync"
)

// output collects the lines of all children.
type output struct {
	max int

	mu sync.Mutex
	w  io.Writer
}

// lines returns a writer for one process.
func (o *output) lines(name string) *lines {
	return &lines{out: o, prefix: "[" + name + "] "}
}

// lines cuts a stream into lines of at most out.max bytes and passes on each with a prefix.
// One goroutine uses it at a time.
type lines struct {
	out    *output
	prefix string
	part   []byte // an unfinished line
	last   string // the last line that was not empty
}

// Write never fails: a child must not die because of its parent's terminal.
func (l *lines) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		end := bytes.IndexByte(p, '\n')
		whole := end >= 0
		if !whole {
			end = len(p)
		}
		take := min(end, l.out.max-len(l.part))
		l.part = append(l.part, p[:take]...)
		p = p[take:]
		switch {
		case take == end && whole:
			p = p[1:]
			l.emit()
		case len(l.part) == l.out.max && len(p) > 0 && p[0] != '\n':
			l.emit()
		}
	}
	return n, nil
}

// flush passes on an unfinished line.
func (l *lines) flush() {
	if len(l.part) > 0 {
		l.emit()
	}
}

func (l *lines) emit() {
	text := bytes.TrimSuffix(l.part, []byte("\r"))
	if len(bytes.TrimSpace(text)) > 0 {
		l.last = string(text)
	}
	line := make([]byte, 0, len(l.prefix)+len(text)+1)
	line = append(append(append(line, l.prefix...), text...), '\n')
	l.part = l.part[:0]
	l.out.mu.Lock()
	defer l.out.mu.Unlock()
	_, _ = l.out.w.Write(line)
}
