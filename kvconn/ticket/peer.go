package ticket

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Bounds of a Peer's fields.
const (
	maxField  = 512
	maxTokens = 1 << 22 // of a prompt, as in kvconn
)

// Peer is a worker that has the beginning of a prompt.
type Peer struct {
	ID     string `json:"id"`
	Epoch  uint64 `json:"epoch"`
	URL    string `json:"url,omitempty"` // where to ask how many tokens it has; "": it holds Tokens for us
	KV     string `json:"kv"`            // host:port of its kvconn
	Tokens int    `json:"tokens"`        // how many it has, from the beginning
}

var errField = errors.New("a field is empty, too long, or has a character that it must not have")

// Validate checks the bounds.
func (p *Peer) Validate() error {
	if p.Tokens < 1 || p.Tokens > maxTokens {
		return fmt.Errorf("%d tokens", p.Tokens)
	}
	for _, s := range []string{p.ID, p.URL, p.KV} {
		if len(s) > maxField || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return errField
		}
	}
	if p.ID == "" || p.KV == "" {
		return errField
	}
	return nil
}

// ParsePeer reads what String writes, from the router's header. Such a peer has a URL.
func ParsePeer(s string) (*Peer, error) {
	f := strings.Split(s, " ")
	if len(s) > 4*maxField || len(f) != 5 || f[2] == "" {
		return nil, errors.New("want ID EPOCH URL KV TOKENS")
	}
	epoch, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		return nil, fmt.Errorf("epoch: %w", err)
	}
	tokens, err := strconv.Atoi(f[4])
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	p := &Peer{ID: f[0], Epoch: epoch, URL: f[2], KV: f[3], Tokens: tokens}
	return p, p.Validate()
}

// String is ID EPOCH URL KV TOKENS, with one blank between them.
func (p *Peer) String() string {
	return fmt.Sprintf("%s %d %s %s %d", p.ID, p.Epoch, p.URL, p.KV, p.Tokens)
}
