package kvconntest

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"strings"
	"sync"
)

// Recorded is a banner or a frame that one side has written.
type Recorded struct {
	Conn  int // in the order of dialling, from 0
	To    Direction
	Step  Step
	Bytes []byte
}

// Recording is what both sides of some sessions have written, in the order in
// which they wrote it.
type Recording []Recorded

// Recorder collects what passes a Chaos.
type Recorder struct {
	mu  sync.Mutex
	all Recording
}

// Record starts collecting.
func Record(c *Chaos) *Recorder {
	r := &Recorder{}
	c.Trace(func(conn int, to Direction, step Step, frame []byte) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.all = append(r.all, Recorded{conn, to, step, append([]byte(nil), frame...)})
	})
	return r
}

// Recording returns what has been collected.
func (r *Recorder) Recording() Recording {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(Recording(nil), r.all...)
}

// MarshalText writes a line a frame: connection, > (to the sender) or <, step
// for the reader's eye, bytes in hex.
func (r Recording) MarshalText() ([]byte, error) {
	var b bytes.Buffer
	for _, f := range r {
		arrow := "<"
		if f.To == ToSender {
			arrow = ">"
		}
		fmt.Fprintf(&b, "%d %s %s %x\n", f.Conn, arrow, f.Step, f.Bytes)
	}
	return b.Bytes(), nil
}

// UnmarshalText reads what MarshalText writes; lines that begin with # are
// comments.
func (r *Recording) UnmarshalText(text []byte) error {
	*r = nil
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, len(text)+1)
	for n := 1; lines.Scan(); n++ {
		if line := lines.Text(); line != "" && !strings.HasPrefix(line, "#") {
			f, err := parseRecorded(line)
			if err != nil {
				return fmt.Errorf("line %d: %w", n, err)
			}
			*r = append(*r, f)
		}
	}
	return lines.Err()
}

func parseRecorded(line string) (f Recorded, err error) {
	var arrow, name, digits string
	if _, err = fmt.Sscanf(line, "%d %s %s %s", &f.Conn, &arrow, &name, &digits); err != nil {
		return f, err
	}
	switch arrow {
	case ">":
		f.To = ToSender
	case "<":
		f.To = ToReceiver
	default:
		return f, fmt.Errorf("direction %q", arrow)
	}
	if f.Bytes, err = hex.DecodeString(digits); err != nil {
		return f, err
	}
	if len(f.Bytes) > 1 && !bytes.HasPrefix(f.Bytes, []byte("xpyd-kv ")) {
		f.Step = Step(f.Bytes[1])
	}
	if f.Step.String() != name {
		return f, fmt.Errorf("a %s says it is a %s", f.Step, name)
	}
	return f, nil
}
