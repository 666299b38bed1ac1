package handover

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"
)

const (
	maxLine    = 64 << 10 // bytes of a message
	sendWithin = 5 * time.Second
)

// Talk is a line of messages, JSON, between two processes. One goroutine at a time receives; Send may
// be called by several.
type Talk struct {
	conn net.Conn
	in   *bufio.Reader

	mu sync.Mutex // one message at a time
}

// newTalk takes the socket over.
func newTalk(f *os.File) (*Talk, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("the line between two processes: %w", err)
	}
	return &Talk{conn: c, in: bufio.NewReaderSize(c, maxLine)}, nil
}

// Send sends a message.
func (t *Talk) Send(v any) error {
	b, err := json.Marshal(v)
	if err == nil && len(b) >= maxLine {
		err = fmt.Errorf("a message of %d bytes", len(b))
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.conn.SetWriteDeadline(time.Now().Add(sendWithin)); err != nil {
		return err
	}
	_, err = t.conn.Write(append(b, '\n'))
	return err
}

// Receive reads the next message into v, until the deadline; a zero one is none. The error is io.EOF
// when the other process has closed its end or ended.
func (t *Talk) Receive(v any, deadline time.Time) error {
	if err := t.conn.SetReadDeadline(deadline); err != nil {
		return err
	}
	line, err := t.in.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return fmt.Errorf("a message of more than %d bytes", maxLine)
	case err != nil:
		return err
	}
	return json.Unmarshal(line, v)
}

// Close ends the line; a Receive under way returns.
func (t *Talk) Close() error { return t.conn.Close() }
