package client

import (
	"bytes"
	"errors"
)

// maxEvent bounds one event of a stream.
const maxEvent = 4 << 20

var errEventTooLong = errors.New("an event of the stream is longer than 4 MiB")

// sse splits an event stream (WHATWG HTML standard, section 9.2) into the data of its events.
// Lines end with LF or CRLF. Its buffers are reused, so events cost no allocation.
type sse struct {
	line  []byte // the beginning of an unfinished line
	data  []byte // data lines of the current event
	any   bool   // data has a line
	isErr bool   // the event's name is error
	done  bool   // data was returned
}

// reset makes s ready for another stream.
func (s *sse) reset() { *s = sse{line: s.line[:0], data: s.data[:0]} }

// next consumes p up to the end of an event. If ok, data is the event's until the next call,
// and rest is what follows it in p.
func (s *sse) next(p []byte) (data, rest []byte, named, ok bool, err error) {
	if s.done {
		s.data, s.any, s.isErr, s.done = s.data[:0], false, false, false
	}
	for len(p) > 0 {
		line, after, ended := bytes.Cut(p, []byte{'\n'})
		if len(s.line)+len(line) > maxEvent {
			return nil, nil, false, false, errEventTooLong
		}
		if !ended {
			s.line = append(s.line, line...)
			return nil, nil, false, false, nil
		}
		p = after
		if len(s.line) > 0 {
			line = append(s.line, line...)
			s.line = line[:0]
		}
		line = bytes.TrimSuffix(line, []byte{'\r'})
		if len(line) == 0 {
			if s.any {
				s.done = true
				return s.data, p, s.isErr, true, nil
			}
			s.isErr = false
			continue
		}
		if err := s.field(line); err != nil {
			return nil, nil, false, false, err
		}
	}
	return nil, nil, false, false, nil
}

func (s *sse) field(line []byte) error {
	if value, ok := bytes.CutPrefix(line, []byte("data:")); ok {
		if len(s.data)+len(value) > maxEvent {
			return errEventTooLong
		}
		if s.any {
			s.data = append(s.data, '\n')
		}
		s.data = append(s.data, bytes.TrimPrefix(value, []byte{' '})...)
		s.any = true
	} else if value, ok := bytes.CutPrefix(line, []byte("event:")); ok {
		s.isErr = string(bytes.TrimPrefix(value, []byte{' '})) == "error"
	}
	return nil // comments, id and retry mean nothing here
}
