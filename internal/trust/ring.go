package trust

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
)

// maxSecrets may be in force at once: the newest, and the one it replaces.
const maxSecrets = 2

// Ring is the secrets in force in a process. It shows the first to others and accepts each. It is
// safe for concurrent use. A nil *Ring belongs to a process that trusts everyone.
type Ring struct {
	now atomic.Pointer[[]Secret]

	mu      sync.Mutex
	given   []Secret // by Set
	retired []string
}

var errCount = errors.New("a fleet has one secret, or two while one replaces the other")

// NewRing makes a ring of one or two secrets.
func NewRing(secrets ...Secret) (*Ring, error) {
	r := &Ring{}
	return r, r.Set(secrets...)
}

// Set puts other secrets in force. Servers' Renew then ends the connections of those that are not.
func (r *Ring) Set(secrets ...Secret) error {
	if len(secrets) < 1 || len(secrets) > maxSecrets {
		return errCount
	}
	if len(secrets) == 2 && secrets[0] == secrets[1] {
		return errors.New("the two fleet secrets are the same")
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.given = slices.Clone(secrets)
	r.sift()
	return nil
}

// Retire keeps the secrets of these names (Secret.String), and only these, out of force even if Set
// names them, as an old copy of a join line may do for years. A process's only secret stays; it
// opens nothing elsewhere. Retire reports whether the secrets in force have changed.
func (r *Ring) Retire(names []string) (changed bool) {
	if r == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retired = slices.Clone(names)
	return r.sift()
}

// sift puts in force what was given and is not retired; mu is held.
func (r *Ring) sift() (changed bool) {
	next := slices.DeleteFunc(slices.Clone(r.given), func(s Secret) bool { return slices.Contains(r.retired, s.String()) })
	if len(next) == 0 {
		next = r.given
	}
	if now := r.now.Load(); now != nil && slices.Equal(*now, next) {
		return false
	}
	r.now.Store(&next)
	return true
}

// Secrets returns those in force, newest first. It must not be changed.
func (r *Ring) Secrets() []Secret { return *r.now.Load() }

// IDs lists the IDs of the secrets in force, newest first: "3238efab+0c55e1f0"; "" for a nil ring.
func (r *Ring) IDs() string {
	if r == nil {
		return ""
	}
	var ids []string
	for _, s := range r.Secrets() {
		ids = append(ids, s.ID())
	}
	return strings.Join(ids, "+")
}

// Shared returns the first of our secrets whose ID is among theirs, or our first if that is "".
func (r *Ring) Shared(theirs string) (Secret, bool) {
	all := r.Secrets()
	if theirs == "" {
		return all[0], true
	}
	for _, s := range all {
		if slices.Contains(strings.Split(theirs, "+"), s.ID()) {
			return s, true
		}
	}
	return Secret{}, false
}

// Member is the audience of tokens for one run of one member: a token that reaches a stranger in its
// place opens nothing.
func Member(id string, epoch uint64) string { return id + "@" + strconv.FormatUint(epoch, 10) }
