// Package trust decides who belongs to the fleet: whoever holds the secret that the router made at
// its first start. What members show each other is derived from it for one purpose and audience, so
// that it opens nothing else. Two secrets may be in force while one replaces the other.
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

// Secret is shared by the members of a fleet. It prints as its ID.
type Secret struct{ raw [secretBytes]byte }

// NewSecret returns a random one.
func NewSecret() Secret {
	var s Secret
	rand.Read(s.raw[:]) // never fails (crypto/rand)
	return s
}

var errSecret = errors.New("a fleet secret is 43 characters of base64url, as in what join-url holds")

// ParseSecret reads what Reveal returned. Its error does not show the text.
func ParseSecret(text string) (Secret, error) {
	var s Secret
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != secretBytes {
		return Secret{}, errSecret
	}
	copy(s.raw[:], b)
	return s, nil
}

// Reveal returns the secret itself, for files and the environment.
func (s Secret) Reveal() string { return base64.RawURLEncoding.EncodeToString(s.raw[:]) }

// ID names the secret without revealing it, in 8 hexadecimal characters.
func (s Secret) ID() string { return hex.EncodeToString(s.Key(purposeID, "", 4)) }

// SecretName is the beginning of a Secret's String.
const SecretName = "fleet-secret-"

// String returns the ID, so that no log shows the secret.
func (s Secret) String() string { return SecretName + s.ID() }

// GoString is String, for %#v.
func (s Secret) GoString() string { return s.String() }

// LogValue is String, for slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// Purpose is what a derived key or token is for.
type Purpose string

// Purposes. Keys of different purposes reveal nothing about each other.
const (
	purposeID Purpose = "id"
	pinned    Purpose = "pinned" // keys of TLS; the audience is an end

	HTTP    Purpose = "http"    // a worker's HTTP routes; the audience is Member's
	Query   Purpose = "query"   // a worker's GET /query, by a peer that does not know it yet; no audience
	Scrape  Purpose = "scrape"  // /metrics, from other hosts; no audience
	KV      Purpose = "kv"      // kvconn's handshake; no audience
	Events  Purpose = "events"  // KV events; the audience is the end that holds the key
	Cluster Purpose = "cluster" // the embedded server's peers; no audience
)

// Key derives n bytes, at most 8,160, by HKDF-SHA256 (RFC 5869) with purpose and audience as info.
func (s Secret) Key(p Purpose, audience string, n int) []byte {
	key, err := hkdf.Key(sha256.New, s.raw[:], nil, "xpyd "+string(p)+"\x00"+audience, n)
	if err != nil { // n alone can be wrong
		panic(err)
	}
	return key
}

const tokenBytes = 24

// Token is shown to the audience as it is: the ID of the secret, a dot, and 32 characters.
func (s Secret) Token(p Purpose, audience string) string {
	return s.ID() + "." + base64.RawURLEncoding.EncodeToString(s.Key(p, audience, tokenBytes))
}
