package kvconntest

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
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

// Recording is what both sides of some sessions have written, in order.
type Recording []Recorded

// Record collects what passes a Chaos from now on; recording returns what has come.
func Record(c *Chaos) (recording func() Recording) {
	var mu sync.Mutex
	var all Recording
	c.Trace(func(conn int, to Direction, step Step, frame []byte) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, Recorded{conn, to, step, bytes.Clone(frame)})
	})
	return func() Recording {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
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
	for n, line := range strings.Split(string(text), "\n") {
		if line != "" && !strings.HasPrefix(line, "#") {
			f, err := parseRecorded(line)
			if err != nil {
				return fmt.Errorf("line %d: %w", n+1, err)
			}
			*r = append(*r, f)
		}
	}
	return nil
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
