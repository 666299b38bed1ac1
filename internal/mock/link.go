package mock

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// kept is a prompt at prefill, by its link; Engine.mu guards it.
type kept struct {
	prompt string // as prefill got it
	ids    string // its token ids, for dialects that pass them on
	ready  bool
	taken  bool
	failed bool
	since  time.Time     // when it became ready or failed
	change chan struct{} // closed and replaced at each change
}

// linkTimeout is how long one side waits for the other. Real engines wait for minutes.
const linkTimeout = 20 * time.Second

// link returns the entry of key; e.mu is held.
func (e *Engine) link(key string) *kept {
	k := e.links[key]
	if k == nil {
		if len(e.links) >= maxRecords {
			for old, o := range e.links {
				if o.taken || o.failed {
					delete(e.links, old)
				}
			}
		}
		k = &kept{change: make(chan struct{})}
		e.links[key] = k
	}
	return k
}

func (k *kept) changed() {
	close(k.change)
	k.change = make(chan struct{})
}

// keep marks the links as ready or failed.
func (e *Engine) keep(keys []string, prompt, ids string, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, key := range keys {
		k := e.link(key)
		k.prompt, k.ids, k.ready, k.failed, k.since = prompt, ids, ok, !ok, time.Now()
		k.changed()
	}
}

// wait waits until cond holds for the link; false if it gave up.
func (e *Engine) wait(ctx context.Context, key string, cond func(*kept) bool) bool {
	ctx, cancel := context.WithTimeout(ctx, linkTimeout)
	defer cancel()
	for {
		e.mu.Lock()
		k := e.link(key)
		ok, change := cond(k), k.change
		e.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-change:
		case <-ctx.Done():
			return false
		case <-e.ctx.Done():
			return false
		}
	}
}

// claim is a decode mock's request to a prefill mock.
type claim struct {
	Link   string `json:"link"`
	Engine string `json:"engine,omitempty"` // the expected engine id
	Prompt string `json:"prompt"`
}

// serveClaim waits for the link, and answers with its prompt, once.
func (e *Engine) serveClaim(w http.ResponseWriter, r *http.Request) {
	var c claim
	if err := json.NewDecoder(io.LimitReader(r.Body, maxBody)).Decode(&c); err != nil {
		fail(w, 400, "claim: %v", err)
		return
	}
	e.mu.Lock()
	id := e.id
	e.mu.Unlock()
	if c.Engine != "" && c.Engine != id {
		fail(w, 409, "engine %q is not here, but %q", c.Engine, id)
		return
	}
	if !e.wait(r.Context(), c.Link, func(k *kept) bool { return k.ready || k.failed }) {
		fail(w, 504, "link %q never came", c.Link)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.link(c.Link)
	switch {
	case k.failed:
		fail(w, 410, "prefill of link %q failed", c.Link)
	case e.lease > 0 && time.Since(k.since) > e.lease:
		fail(w, 410, "the lease of link %q is over", c.Link)
	case k.taken:
		fail(w, 409, "link %q was collected before", c.Link)
	case c.Prompt != k.prompt && c.Prompt != k.ids:
		fail(w, 409, "link %q is of another prompt", c.Link)
	default:
		k.taken = true
		k.changed()
		writeJSON(w, map[string]string{"prompt": k.prompt})
	}
}

// collect claims a link from the peer, and returns the prompt as prefill got it.
func (e *Engine) collect(ctx context.Context, peer string, c claim) (string, error) {
	body, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, linkTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+peer+"/mock/claim", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	resp, err := e.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return "", err
	}
	var v struct{ Prompt string }
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("collect from %s: %d %s", peer, resp.StatusCode, text)
	}
	return v.Prompt, json.Unmarshal(text, &v)
}
