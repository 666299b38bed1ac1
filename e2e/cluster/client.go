package cluster

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// NewClient returns an HTTP client of its own connections, closed with t.
func NewClient(t testing.TB) *http.Client {
	tr := &http.Transport{MaxIdleConnsPerHost: 256}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// Reply is a completion of one choice as its client saw it, streamed or not.
type Reply struct {
	Status          int
	Prefill, Decode string // who answered
	Text            string
	Finish          string
	Chunks          int    // events with text; 1 for a whole body
	Problem         string // the API error's message: a status, or an error event
	Err             error  // the connection's own end; nil when the answer is complete
	Start, End      time.Time
	First           time.Time // first byte of the body; zero if none came
}

// Good says that the answer is whole.
func (r *Reply) Good() bool { return r.Status == 200 && r.Problem == "" && r.Err == nil }

func (r *Reply) String() string {
	return fmt.Sprintf("status %d by %s and %s, %d chunks, %d bytes, finish %q, problem %q, error %v, first byte after %v, end after %v",
		r.Status, r.Prefill, r.Decode, r.Chunks, len(r.Text), r.Finish, r.Problem, r.Err,
		r.First.Sub(r.Start).Round(time.Millisecond), r.End.Sub(r.Start).Round(time.Millisecond))
}

type chunk struct {
	Choices []struct {
		Index   int
		Text    string
		Finish  *string `json:"finish_reason"`
		Message struct{ Content string }
		Delta   struct{ Content string }
	}
	Error *struct{ Message string }
}

// Post sends a completion or chat request and reads the answer to its end.
func Post(ctx context.Context, client *http.Client, url, body string) *Reply {
	r := &Reply{Start: time.Now()}
	defer func() { r.End = time.Now() }()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		r.Err = err
		return r
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		r.Err = err
		return r
	}
	defer resp.Body.Close()
	r.Status, r.Prefill, r.Decode = resp.StatusCode, resp.Header.Get("x-xpyd-prefill"), resp.Header.Get("x-xpyd-decode")
	in := bufio.NewReader(resp.Body)
	if _, err := in.Peek(1); err == nil {
		r.First = time.Now()
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		r.stream(in)
		return r
	}
	var c chunk
	if r.Err = json.NewDecoder(in).Decode(&c); r.Err == nil {
		r.addChunk(&c)
	}
	return r
}

// stream reads events up to [DONE] or an error event; any other end is Err.
func (r *Reply) stream(in *bufio.Reader) {
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			r.Err = fmt.Errorf("the stream just stopped: %w", err)
			return
		}
		data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data: ")
		switch {
		case !ok:
			continue
		case data == "[DONE]":
			return
		}
		var c chunk
		if r.Err = json.Unmarshal([]byte(data), &c); r.Err != nil {
			return
		}
		if r.addChunk(&c); r.Problem != "" {
			return
		}
	}
}

func (r *Reply) addChunk(c *chunk) {
	if c.Error != nil {
		r.Problem = c.Error.Message
		return
	}
	r.Chunks++
	for _, ch := range c.Choices {
		r.Text += ch.Text + ch.Message.Content + ch.Delta.Content
		if ch.Finish != nil {
			r.Finish = *ch.Finish
		}
	}
}
