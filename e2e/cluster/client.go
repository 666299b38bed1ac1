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
	Prefill, Decode string // the workers
	Text            string
	Finish          string
	Chunks          int    // events with text; 1 for a whole body
	Seams           int    // times that another pair went on with the stream
	Problem         string // message of an API error: by status, or an error event
	Err             error  // how the connection broke; nil when the answer is complete
	Start, End      time.Time
	First           time.Time // first byte of the body; zero if none came
}

// Good reports whether the answer is complete.
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
	r.Err = r.post(ctx, client, url, body)
	r.End = time.Now()
	return r
}

func (r *Reply) post(ctx context.Context, client *http.Client, url, body string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	r.Status, r.Prefill, r.Decode = resp.StatusCode, resp.Header.Get("x-xpyd-prefill"), resp.Header.Get("x-xpyd-decode")
	in := bufio.NewReader(resp.Body)
	if _, err := in.Peek(1); err == nil {
		r.First = time.Now()
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return r.stream(in)
	}
	var c chunk
	if err := json.NewDecoder(in).Decode(&c); err != nil {
		return err
	}
	r.addChunk(&c)
	return nil
}

// stream reads events up to [DONE] or an error event. Any other end is an error.
func (r *Reply) stream(in *bufio.Reader) error {
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return fmt.Errorf("the stream just stopped: %w", err)
		}
		data, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "data: ")
		switch {
		case !ok:
			if strings.HasPrefix(line, ": xpyd seam") {
				r.Seams++
			}
			continue
		case data == "[DONE]":
			return nil
		}
		var c chunk
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			return err
		}
		if r.addChunk(&c); r.Problem != "" {
			return nil
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
