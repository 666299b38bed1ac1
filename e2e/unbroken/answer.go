package unbroken

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Answer is a stream as its client saw it.
type Answer struct {
	Decode  string // the worker that began it
	Seams   int
	Events  map[string][]string // by choice, in order; "" for those without one
	Pause   time.Duration       // the longest between two events
	Err     error
	created []string
}

var (
	createdField = regexp.MustCompile(`"created":\d+,`)
	cachedField  = regexp.MustCompile(`"cached_tokens":\d+`)
	callID       = regexp.MustCompile(`"call_\w{24}"`) // a hash also of when the request came
)

// Tell sends a request and reads the answer; met is called with the number of a stream's events so
// far. The answer to one that does not stream is one event, for which met is not called.
func Tell(ctx context.Context, client *http.Client, url, id, body string, met func(decode string, n int)) *Answer {
	s := &Answer{Events: map[string][]string{}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		s.Err = err
		return s
	}
	req.Header.Set("x-request-id", id)
	resp, err := client.Do(req)
	if err != nil {
		s.Err = err
		return s
	}
	defer resp.Body.Close()
	s.Decode = resp.Header.Get("x-xpyd-decode")
	if resp.StatusCode == 200 && strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		s.Err = s.read(resp.Body, met)
	} else if whole, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
		s.Err = fmt.Errorf("status %d, %v: %s", resp.StatusCode, err, whole)
	} else {
		s.note("whole", string(whole))
	}
	return s
}

// note keeps an event without what may differ.
func (s *Answer) note(choice, data string) {
	if at := createdField.FindString(data); !slices.Contains(s.created, at) {
		s.created = append(s.created, at)
	}
	data = callID.ReplaceAllString(cachedField.ReplaceAllString(createdField.ReplaceAllString(data, ""), ""), "")
	s.Events[choice] = append(s.Events[choice], data)
}

// Differs says in what s is not as want; "" if it is.
func (s *Answer) Differs(want *Answer) string {
	if s.Err != nil {
		return s.Err.Error()
	}
	if len(s.created) != 1 {
		return fmt.Sprintf("created at %v", s.created)
	}
	if k, l := slices.Sorted(maps.Keys(s.Events)), slices.Sorted(maps.Keys(want.Events)); !slices.Equal(k, l) {
		return fmt.Sprintf("choices %q, want %q", k, l)
	}
	for c, events := range want.Events {
		for n := range max(len(events), len(s.Events[c])) {
			if n >= len(events) || n >= len(s.Events[c]) || events[n] != s.Events[c][n] {
				return fmt.Sprintf("choice %s, event %d of %d, %d wanted:\n%q\n%q", c, n, len(s.Events[c]), len(events),
					s.Events[c][min(n, len(s.Events[c])):min(n+2, len(s.Events[c]))], events[min(n, len(events)):min(n+2, len(events))])
			}
		}
	}
	return ""
}

func (s *Answer) read(body io.Reader, met func(string, int)) error {
	in := bufio.NewReader(body)
	last := time.Time{}
	for n := 1; ; {
		line, err := in.ReadString('\n')
		if err != nil {
			return fmt.Errorf("it just stopped: %w", err)
		}
		line = strings.TrimSuffix(line, "\n")
		data, ok := strings.CutPrefix(line, "data: ")
		switch {
		case line == "":
			continue
		case line == ": xpyd seam":
			s.Seams++
			continue
		case data == "[DONE]":
			_, err := io.Copy(io.Discard, in)
			return err
		case !ok:
			return fmt.Errorf("a line %q", line)
		}
		var e struct {
			Choices []struct{ Index int }
			Error   any
		}
		if err := json.Unmarshal([]byte(data), &e); err != nil || e.Error != nil {
			return fmt.Errorf("%v in %s", err, data)
		}
		choice := ""
		if len(e.Choices) > 0 {
			choice = fmt.Sprint(e.Choices[0].Index)
		}
		s.note(choice, data)
		now := time.Now()
		if n > 1 {
			s.Pause = max(s.Pause, now.Sub(last))
		}
		last = now
		met(s.Decode, n)
		n++
	}
}
