package requestlog

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Log is a file that was read.
type Log struct {
	Header
	Requests []Request // by arrival
	Dropped  int       // requests without a line
	Cut      bool      // the last line was no whole one: it is still being written, or the disk was full
}

const (
	maxLine     = 1 << 20
	maxRequests = 10_000_000
)

// Read reads a log, which may still be written: a last line that is not whole does not count. It
// returns nothing beside an error.
func Read(r io.Reader) (*Log, error) {
	in, log := bufio.NewReaderSize(r, maxLine), &Log{}
	for number := 1; ; number++ {
		line, err := in.ReadSlice('\n')
		last := err == io.EOF
		if last && json.Valid(line) {
			err = nil
		}
		switch {
		case err == io.EOF && number == 1:
			err = errors.New("no header of a request log")
		case err == io.EOF:
			log.Cut = len(bytes.TrimSpace(line)) > 0
			slices.SortStableFunc(log.Requests, func(a, b Request) int { return cmp.Compare(a.Arrived, b.Arrived) })
			return log, nil
		case errors.Is(err, bufio.ErrBufferFull):
			err = fmt.Errorf("more than %d bytes", maxLine)
		case err != nil:
		case number == 1:
			err = log.header(line)
		default:
			err = log.line(line, number)
		}
		if err != nil {
			if number == 1 && bytes.HasPrefix(line, []byte("\x1f\x8b")) {
				err = errors.New("it is compressed by gzip: unpack it first")
			}
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
	}
}

func (l *Log) header(line []byte) error {
	if err := json.Unmarshal(line, &l.Header); err != nil {
		return fmt.Errorf("no header of a request log: %w", err)
	}
	return l.Header.check()
}

func (l *Log) line(line []byte, number int) error {
	switch {
	case len(bytes.TrimSpace(line)) == 0:
		return nil
	case bytes.HasPrefix(line, []byte(`{"request_log":`)):
		return errors.New("another header: each file is a log of its own")
	}
	if bytes.HasPrefix(line, []byte(`{"dropped":`)) {
		var d dropped
		if err := json.Unmarshal(line, &d); err != nil {
			return err
		}
		if d.Dropped < 0 || d.Dropped > 1<<53 {
			return fmt.Errorf("dropped %d", d.Dropped)
		}
		l.Dropped = min(l.Dropped+d.Dropped, 1<<53)
		return nil
	}
	q := Request{Line: number}
	if err := json.Unmarshal(line, &q); err != nil {
		return err
	}
	if len(l.Requests) == maxRequests {
		return fmt.Errorf("more than %d requests", maxRequests)
	}
	l.Requests = append(l.Requests, q)
	return q.check()
}
