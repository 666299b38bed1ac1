package kvbench

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// The receiver's requests, one JSON object a line, each answered by one. The first is
// start; the end of the connection frees everything.
const (
	askStart = "start" // make the pool, listen for sessions
	askCPU   = "cpu"   // CPU time used so far
	askBare  = "bare"  // serve the bare writev loop
)

type request struct {
	Ask         string `json:"ask"`
	Config      Config `json:"config"`
	Transport   string `json:"transport"`             // start: which of tcp and shm
	Connections int    `json:"connections,omitempty"` // bare
}

type answer struct {
	Error string        `json:"error,omitempty"`
	Addr  string        `json:"addr,omitempty"` // start, bare: where to dial
	CPU   time.Duration `json:"cpu,omitempty"`
}

// controlIdle is how long either end waits for the other: building a pool of
// the largest size, or one whole repetition, must fit.
const controlIdle = 10 * time.Minute

// control is one end of the control connection; one goroutine uses it.
type control struct {
	c net.Conn
	r *bufio.Reader
}

func newControl(c net.Conn) *control {
	return &control{c, bufio.NewReaderSize(c, maxConfig)}
}

func (k *control) send(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := k.c.SetWriteDeadline(time.Now().Add(controlIdle)); err != nil {
		return err
	}
	_, err = k.c.Write(append(b, '\n'))
	return err
}

// receive reads one line; a longer one than maxConfig is an error.
func (k *control) receive(v any) error {
	if err := k.c.SetReadDeadline(time.Now().Add(controlIdle)); err != nil {
		return err
	}
	line, err := k.r.ReadSlice('\n')
	if err != nil {
		return err
	}
	return json.Unmarshal(line, v)
}

// ask sends a request and returns its answer.
func (k *control) ask(q request) (answer, error) {
	var a answer
	err := k.send(q)
	if err == nil {
		err = k.receive(&a)
	}
	if err == nil && a.Error != "" {
		err = errors.New(a.Error)
	}
	if err != nil {
		return a, fmt.Errorf("sender: %s: %w", q.Ask, err)
	}
	return a, nil
}
