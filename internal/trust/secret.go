// Package trust is who belongs to the fleet: one secret that the router makes at
// its first start and every member holds. What members show each other is
// derived from it, for one purpose and one audience at a time, so that what one
// connection gives away opens no other. Two secrets may be in force at once,
// while one replaces the other.
//
// It knows nothing of who dials whom.
package trust

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"log/slog"
)

const secretBytes = 32

// Secret is what the members of one fleet share. It prints as its ID.
type Secret struct{ raw [secretBytes]byte }

// NewSecret returns a random one.
func NewSecret() Secret {
	var s Secret
	rand.Read(s.raw[:]) // never fails (crypto/rand)
	return s
}

var errSecret = errors.New("a fleet secret is 43 characters of base64url, as in what join-url holds")

// ParseSecret reads what Reveal returned. The error never shows the text.
func ParseSecret(text string) (Secret, error) {
	var s Secret
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != secretBytes {
		return Secret{}, errSecret
	}
	copy(s.raw[:], b)
	return s, nil
}

// Reveal returns the secret itself, for the files and the environment that hand
// it on.
func (s Secret) Reveal() string { return base64.RawURLEncoding.EncodeToString(s.raw[:]) }

// ID names the secret without telling it: 8 hexadecimal characters.
func (s Secret) ID() string {
	id := s.Key(purposeID, "", 4)
	return hex.EncodeToString(id)
}

// SecretName is how a Secret's String begins.
const SecretName = "fleet-secret-"

// String returns the ID, so that no log shows the secret.
func (s Secret) String() string { return SecretName + s.ID() }

// GoString is String, for %#v.
func (s Secret) GoString() string { return s.String() }

// LogValue is String, for slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// Purpose is what a derived key or token is good for.
type Purpose string

// Purposes. Keys of different purposes tell nothing of each other.
const (
	purposeID Purpose = "id"
	pinned    Purpose = "pinned" // keys of TLS; the audience is an end

	HTTP    Purpose = "http"    // a worker's HTTP routes; the audience is Member's
	Query   Purpose = "query"   // GET /query of a worker, by one that does not know yet whom it asks; no audience
	Scrape  Purpose = "scrape"  // /metrics, from other hosts; no audience
	KV      Purpose = "kv"      // kvconn's handshake; no audience
	Events  Purpose = "events"  // KV events; the audience is the end that holds the key
	Cluster Purpose = "cluster" // the embedded server's peers; no audience
)

// Key derives n bytes by HKDF-SHA256 (RFC 5869) with the purpose and the audience
// as its info. n is at most 8,160.
func (s Secret) Key(p Purpose, audience string, n int) []byte {
	key, err := hkdf.Key(sha256.New, s.raw[:], nil, "xpyd "+string(p)+"\x00"+audience, n)
	if err != nil { // n alone can be wrong
		panic(err)
	}
	return key
}

const tokenBytes = 24

// Token is what is shown, as it is, to the audience: the secret's ID, which says
// which of two it comes from, a dot, and 32 characters.
func (s Secret) Token(p Purpose, audience string) string {
	return s.ID() + "." + base64.RawURLEncoding.EncodeToString(s.Key(p, audience, tokenBytes))
}
