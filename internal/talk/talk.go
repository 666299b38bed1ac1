// Package talk asks an OpenAI-compatible server one turn after the other and hands over the
// answer as it arrives: what a person at a terminal needs.
package talk

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// Message is one of a chat.
type Message struct {
	Role    string `json:"role"` // system, user or assistant
	Content string `json:"content"`
}

// Client asks one server. It is not safe for several goroutines.
type Client struct {
	URL         string // with or without a final /v1
	APIKey      string
	Model       string // "" is the server's only one
	MaxTokens   int    // of an answer; 0 leaves it to the server
	Temperature *float64
	Raw         bool          // continue the last message's text by /v1/completions, without a chat template
	Silence     time.Duration // the longest that the server may say nothing; more than 0
	HTTP        *http.Client
}

// Answer is what came back.
type Answer struct {
	Text   string
	Finish string        // why it ended: stop, length, …
	First  time.Duration // until its first piece
	Took   time.Duration // until its end
	Tokens int           // as the server counts them; 0 if it does not say
}

// Refused is a server's own error.
type Refused struct {
	Status  int // 200 if the stream had begun
	Message string
}

func (e *Refused) Error() string { return e.Message }

// NoTemplate reports whether a model can only continue texts, which Raw does.
func NoTemplate(err error) bool {
	refused, ok := errors.AsType[*Refused](err)
	return ok && refused.Status == http.StatusBadRequest && strings.Contains(refused.Message, "chat template")
}

var errSilent = errors.New("the server fell silent")

// maxEvent bounds an event of a stream, maxError an error's text, maxText an answer.
const maxEvent, maxError, maxText = 4 << 20, 64 << 10, 64 << 20

// Ask sends the messages and calls piece with each part of the answer. What had come before an
// error is in the answer beside it.
func (c *Client) Ask(ctx context.Context, messages []Message, piece func(string)) (Answer, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(c.Silence, func() { cancel(errSilent) })
	defer silence.Stop()
	a := Answer{}
	start := time.Now()
	err := c.ask(ctx, messages, func(e *event) error {
		silence.Reset(c.Silence)
		if e.Usage.Completion > 0 {
			a.Tokens = e.Usage.Completion
		}
		for _, choice := range e.Choices {
			if choice.Finish != "" {
				a.Finish = choice.Finish
			}
			for _, text := range []string{choice.Delta.Content, choice.Text} {
				if text == "" {
					continue
				}
				if a.First == 0 {
					a.First = time.Since(start)
				}
				if len(a.Text)+len(text) > maxText {
					return fmt.Errorf("the answer is over %d bytes", maxText)
				}
				a.Text += text
				piece(text)
			}
		}
		return nil
	})
	a.Took = time.Since(start)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
		if errors.Is(err, errSilent) {
			err = fmt.Errorf("%w for %v", errSilent, c.Silence)
		}
	}
	return a, err
}

// event is what one of a stream says.
type event struct {
	Choices []struct {
		Delta  struct{ Content string }
		Text   string
		Finish string `json:"finish_reason"`
	}
	Usage struct {
		Completion int `json:"completion_tokens"`
	}
	Error *struct{ Message string }
}

func (c *Client) request(ctx context.Context, messages []Message) (*http.Request, error) {
	path := "/v1/chat/completions"
	body := map[string]any{"stream": true, "stream_options": map[string]bool{"include_usage": true}}
	if c.Raw {
		path, body["prompt"] = "/v1/completions", messages[len(messages)-1].Content
	} else {
		body["messages"] = messages
	}
	if c.Model != "" {
		body["model"] = c.Model
	}
	if c.MaxTokens > 0 {
		body["max_tokens"] = c.MaxTokens
	}
	if c.Temperature != nil {
		body["temperature"] = *c.Temperature
	}
	raw, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	base := strings.TrimSuffix(strings.TrimSuffix(c.URL, "/"), "/v1")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+path, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+c.APIKey)
	}
	return req, nil
}

// ask posts, and calls each with the events of the answer, up to its [DONE].
func (c *Client) ask(ctx context.Context, messages []Message, each func(*event) error) error {
	req, err := c.request(ctx, messages)
	if err != nil {
		return err
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, maxError))
		var e event
		if json.Unmarshal(text, &e) == nil && e.Error != nil && e.Error.Message != "" {
			return &Refused{resp.StatusCode, e.Error.Message}
		}
		return &Refused{resp.StatusCode, resp.Status}
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, maxEvent)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		if data = bytes.TrimSpace(data); string(data) == "[DONE]" {
			return nil
		}
		var e event
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("an event of the stream: %w", err)
		}
		if e.Error != nil {
			return &Refused{resp.StatusCode, e.Error.Message}
		}
		if err := each(&e); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return fmt.Errorf("the stream ended without [DONE]: %w", io.ErrUnexpectedEOF)
}
