package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
)

// maxReply bounds the size of a reply.
const maxReply = 16 << 20

// choice is one choice of a reply, joined from its events.
type choice struct {
	text   string
	ids    []int // if the server returns them
	finish string
}

// reply is the outcome of a request.
type reply struct {
	choices map[int]*choice
	prompt  int // tokens by usage, if the server returns it
	done    bool
	err     error
}

func (r *reply) String() string {
	if r.err != nil {
		return "failed"
	}
	n := 0
	for _, c := range r.choices {
		n += len(c.ids)
	}
	return fmt.Sprintf("%d tokens", n)
}

// chunk is a body or an event of either API.
type chunk struct {
	Choices []struct {
		Index    int
		Text     string
		Finish   string `json:"finish_reason"`
		TokenIDs []int  `json:"token_ids"`
		Message  struct{ Content string }
		Delta    struct{ Content string }
	}
	Usage *struct {
		Prompt int `json:"prompt_tokens"`
	}
	Error json.RawMessage
}

// fetch sends one request and reads the reply to its end.
func (r *reply) fetch(ctx context.Context, url string, c testCase) error {
	body, err := json.Marshal(c.body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+c.path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	in := io.LimitReader(resp.Body, maxReply)
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(in, 300)) // whatever there is
		return fmt.Errorf("status %d: %s", resp.StatusCode, bytes.TrimSpace(text))
	}
	if c.stream() {
		return r.events(in)
	}
	var v chunk
	if err := json.NewDecoder(in).Decode(&v); err != nil {
		return err
	}
	return r.add(&v)
}

// events reads a stream. It ignores the content type: vLLM's example proxy calls every stream
// application/json.
func (r *reply) events(in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxReply)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			r.done = true
			continue
		}
		var v chunk
		if err := json.Unmarshal([]byte(data), &v); err != nil {
			return fmt.Errorf("event %.200s: %w", data, err)
		}
		if err := r.add(&v); err != nil {
			return err
		}
	}
	if lines.Err() == nil && !r.done {
		return errors.New("the stream ended without [DONE]")
	}
	return lines.Err()
}

func (r *reply) add(v *chunk) error {
	if len(v.Error) > 0 && string(v.Error) != "null" {
		return fmt.Errorf("error: %.300s", v.Error)
	}
	for _, c := range v.Choices {
		to := r.choices[c.Index]
		if to == nil {
			to = &choice{}
			r.choices[c.Index] = to
		}
		to.text += c.Text + c.Message.Content + c.Delta.Content
		to.ids = append(to.ids, c.TokenIDs...)
		if c.Finish != "" {
			to.finish = c.Finish
		}
	}
	if v.Usage != nil && v.Usage.Prompt > 0 {
		r.prompt = v.Usage.Prompt
	}
	return nil
}

// differs describes the first difference, or returns "". A proxy may drop token ids but not text.
func differs(want, got *reply) string {
	switch {
	case want.err != nil:
		return "nothing to compare with"
	case got.err != nil:
		return got.err.Error()
	case len(want.choices) != len(got.choices):
		return fmt.Sprintf("%d choices, want %d", len(got.choices), len(want.choices))
	case want.prompt != got.prompt && got.prompt != 0:
		return fmt.Sprintf("usage has %d prompt tokens, want %d", got.prompt, want.prompt)
	}
	for _, i := range slices.Sorted(maps.Keys(want.choices)) {
		w, g := want.choices[i], got.choices[i]
		switch {
		case g == nil:
			return fmt.Sprintf("choice %d is missing", i)
		case len(g.ids) > 0 && len(w.ids) > 0 && !slices.Equal(w.ids, g.ids):
			at := 0
			for at < min(len(w.ids), len(g.ids)) && w.ids[at] == g.ids[at] {
				at++
			}
			return fmt.Sprintf("choice %d differs at token %d of %d", i, at, len(w.ids))
		case w.text != g.text:
			return fmt.Sprintf("choice %d: text %.60q, want %.60q", i, g.text, w.text)
		case w.finish != g.finish:
			return fmt.Sprintf("choice %d: finish %q, want %q", i, g.finish, w.finish)
		}
	}
	return ""
}
