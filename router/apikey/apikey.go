// Package apikey reads who may use a router: a file of keys, which holds only their SHA-256
// hashes, and what each key's owner may do.
//
// The keys that New makes have 256 random bits, so a plain hash is enough: it cannot be
// reversed, and guessing is hopeless. Keys that people think up are not safe in such a file.
package apikey

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/xpyd/xpyd/internal/config"
	"github.com/xpyd/xpyd/internal/datadir"
	"github.com/xpyd/xpyd/router/limit"
)

// Key is a key's owner and what they may do.
type Key struct {
	// Name is the tenant: in logs, metrics and the order of the queue.
	Name string `key:"name"`
	// SHA256 is the key's hash in hexadecimal digits.
	SHA256 string `key:"sha256"`

	// RequestsPerMinute and TokensPerMinute (of prompts and answers) bound the rate,
	// MaxInFlight what runs and waits at once; 0: unbounded.
	RequestsPerMinute int64 `key:"requests_per_minute"`
	TokensPerMinute   int64 `key:"tokens_per_minute"`
	MaxInFlight       int   `key:"max_in_flight"`
	// Weight is the share of places while requests wait; 0 is 1.
	Weight float64 `key:"weight"`
	// Priority is the best that may be asked for: high, normal or low; "" is normal.
	Priority string `key:"priority"`
	// TTFTPromise, TPOTPromise and ITLPromise are what requests are promised: their first token, and the mean
	// and the longest of the times between their tokens; 0: what the workers promise. Only xpyd's own workers know.
	TTFTPromise time.Duration `key:"ttft_promise"`
	TPOTPromise time.Duration `key:"tpot_promise"`
	ITLPromise  time.Duration `key:"itl_promise"`
	// Models that may be used; a * at the end matches any rest. None: all.
	Models []string `key:"models"`
	// Cache is the prefix cache of its requests, of xpyd's own workers: keys with the same one see
	// what each other had cached. "" is its Name, so that no key does; CacheShared is everybody's.
	Cache string `key:"cache"`
	// NamesTenants lets the key's owner, such as a gateway in front, say whom a request is
	// for: see the router's tenant_header.
	NamesTenants bool `key:"names_tenants"`
	// Expires is when the key ends; zero is never.
	Expires time.Time `key:"expires"`

	hash [sha256.Size]byte
}

// CacheShared is the Cache of keys that share with each other and with requests that need no key.
const CacheShared = "shared"

// File is what a file of keys holds.
type File struct {
	Keys []Key `key:"keys"`
}

// Validate returns the first *config.KeyError.
func (k *Key) Validate() error {
	if !PlainName(k.Name) {
		return config.Bad("name", "%q is not of 1 to 64 letters, digits and ._-@:/", k.Name)
	}
	if b, err := hex.DecodeString(k.SHA256); err != nil || len(b) != sha256.Size {
		return config.Bad("sha256", "want the 64 hexadecimal digits of the key's SHA-256")
	}
	if err := cmp.Or(config.AtLeast("requests_per_minute", k.RequestsPerMinute, 0), config.AtLeast("tokens_per_minute", k.TokensPerMinute, 0),
		config.AtLeast("max_in_flight", k.MaxInFlight, 0)); err != nil {
		return err
	}
	if !(k.Weight == 0 || k.Weight >= 0.001 && k.Weight <= 1000) {
		return config.Bad("weight", "%v is not within 0.001 and 1000", k.Weight)
	}
	if err := cmp.Or(promise("ttft_promise", k.TTFTPromise), promise("tpot_promise", k.TPOTPromise), promise("itl_promise", k.ITLPromise)); err != nil {
		return err
	}
	if k.Cache != "" && !PlainName(k.Cache) {
		return config.Bad("cache", "%q is not of 1 to 64 letters, digits and ._-@:/", k.Cache)
	}
	if _, ok := limit.ParseClass(k.Priority); k.Priority != "" && !ok {
		return config.Bad("priority", "%q is not high, normal or low", k.Priority)
	}
	return nil
}

// promise refuses what workers would.
func promise(key string, d time.Duration) error {
	if d != 0 && (d < time.Millisecond || d > time.Hour) {
		return config.Bad(key, "%v is not 0, nor within 1ms and 1h", d)
	}
	return nil
}

// Validate refuses duplicate names and keys.
func (f *File) Validate() error {
	names, hashes := map[string]bool{}, map[string]string{}
	for i, k := range f.Keys {
		hash := strings.ToLower(k.SHA256)
		switch other, twice := hashes[hash]; {
		case names[k.Name]:
			return config.Bad(fmt.Sprintf("keys[%d].name", i), "%q is there twice", k.Name)
		case twice:
			return config.Bad(fmt.Sprintf("keys[%d].sha256", i), "%q and %q have the same key", other, k.Name)
		}
		names[k.Name], hashes[hash] = true, k.Name
	}
	return nil
}

// PlainName reports whether s can be a tenant's name, which shows in logs, metrics and
// headers.
func PlainName(s string) bool {
	const chars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@:/"
	return len(s) > 0 && len(s) <= 64 && strings.Trim(s, chars) == ""
}

// Class is the best priority that may be asked for.
func (k *Key) Class() limit.Class {
	c, ok := limit.ParseClass(k.Priority)
	if !ok {
		return limit.Normal
	}
	return c
}

// CacheName is what workers are told of Cache; "": nothing.
func (k *Key) CacheName() string {
	if k.Cache == CacheShared {
		return ""
	}
	return cmp.Or(k.Cache, k.Name)
}

// Rates are the key's limits.
func (k *Key) Rates() limit.Rates {
	return limit.Rates{Requests: k.RequestsPerMinute, Tokens: k.TokensPerMinute, InFlight: k.MaxInFlight}
}

// May reports whether the key's owner may use a model.
func (k *Key) May(model string) bool {
	for _, m := range k.Models {
		if prefix, ok := strings.CutSuffix(m, "*"); m == model || ok && strings.HasPrefix(model, prefix) {
			return true
		}
	}
	return len(k.Models) == 0
}

// Expired reports whether the key has ended.
func (k *Key) Expired(now time.Time) bool { return !k.Expires.IsZero() && !now.Before(k.Expires) }

// Load reads a file of keys. Errors name the line; they hold no key, as the file has none. A file
// without a list is an error, as it may have been emptied by mistake; "keys: []" lets nobody in.
// So is one that others than this user and root may change.
func Load(path string) ([]Key, error) { return load(path, ours) }

// Read is Load for a file that nobody is let in by.
func Read(path string) ([]Key, error) { return load(path, regular) }

func load(path string, open func(string) (*os.File, error)) ([]Key, error) {
	var f File
	if err := config.Load(&f, config.Options{File: path, Open: open}); err != nil {
		return nil, err
	}
	if f.Keys == nil {
		return nil, fmt.Errorf("%s: it has no keys; \"keys: []\" would let nobody in", path)
	}
	return f.Keys, nil
}

// regular opens a file and does not wait for a pipe's other end.
func regular(path string) (*os.File, error) { return opened(path, nil) }

// ours opens a file that only this user and root can change. It may be behind links, as
// Kubernetes mounts secrets.
func ours(path string) (*os.File, error) {
	return opened(path, func(info fs.FileInfo) error {
		if uid := datadir.Owner(info); uid != 0 && uid != os.Geteuid() {
			return fmt.Errorf("%s belongs to uid %d, who could let anybody in, and this is uid %d: make your own copy", path, uid, os.Geteuid())
		}
		if info.Mode()&0o022 != 0 {
			return fmt.Errorf("%s has mode %04o, so that others may change it: run `chmod go-w %s`", path, info.Mode().Perm(), path)
		}
		return nil
	})
}

func opened(path string, check func(fs.FileInfo) error) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is not a regular file", path)
	case check != nil:
		err = check(info)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Plain makes an unlimited key of a secret in plain text.
func Plain(name, secret string) Key {
	sum := sha256.Sum256([]byte(secret))
	return Key{Name: name, SHA256: hex.EncodeToString(sum[:]), Priority: limit.High.String()}
}

// Ring finds keys. It is immutable.
type Ring struct {
	keys map[uint64][]*Key // by the first bytes of the hash
}

// NewRing takes valid keys; others are left out.
func NewRing(keys []Key) *Ring {
	r := &Ring{keys: make(map[uint64][]*Key, len(keys))}
	for _, k := range keys {
		if n, err := hex.Decode(k.hash[:], []byte(k.SHA256)); err != nil || n != len(k.hash) {
			continue // it was not validated
		}
		at := binary.BigEndian.Uint64(k.hash[:])
		r.keys[at] = append(r.keys[at], &k)
	}
	return r
}

// Find returns the key of a secret, nil if there is none. Where it looks depends only on the
// hash of what was presented, which says nothing about other keys; hashes are compared in
// constant time.
func (r *Ring) Find(secret []byte) *Key {
	sum := sha256.Sum256(secret)
	for _, k := range r.keys[binary.BigEndian.Uint64(sum[:])] {
		if subtle.ConstantTimeCompare(sum[:], k.hash[:]) == 1 {
			return k
		}
	}
	return nil
}

// Prefix begins each key that New makes, so that leaked ones can be found.
const Prefix = "sk-xpyd-"

// New makes a key. The secret is shown to its owner and then forgotten.
func New(name string) (secret string, k Key) {
	var b [32]byte
	rand.Read(b[:]) // never fails
	secret = Prefix + base64.RawURLEncoding.EncodeToString(b[:])
	k = Plain(name, secret)
	k.Priority = ""
	return secret, k
}

const header = `# API keys of a router, as api_keys_file names it. Only hashes are here; made by
# "xpyd keys new". A running router reads the file again when it changes.
keys:
`

// Append adds a key to the file, which it makes if there is none. The rest of the file stays
// as it is, with its comments.
func Append(path string, k Key) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read keys: %w", err)
	}
	text, mode := old, fs.FileMode(0o600)
	if err != nil || len(bytes.TrimSpace(old)) == 0 {
		text = []byte(header)
	} else if info, err := os.Stat(path); err == nil {
		mode = info.Mode().Perm()
	}
	text = append(bytes.TrimRight(slices.Clone(text), "\n"), '\n')
	text = append(text, k.yaml()...)
	tmp, err := os.CreateTemp(filepath.Dir(path), ".keys-*")
	if err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	defer os.Remove(tmp.Name()) // no matter once it is renamed
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Chmod(mode), tmp.Close())
	if err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	keys, err := Load(tmp.Name())
	if err == nil && !slices.ContainsFunc(keys, func(o Key) bool { return o.SHA256 == k.SHA256 }) {
		err = errors.New("the file does not end with its list of keys")
	}
	if err != nil {
		return fmt.Errorf("add the key to %s: %s", path, strings.ReplaceAll(err.Error(), tmp.Name(), path))
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("write keys: %w", err)
	}
	return nil
}

func (k *Key) yaml() string {
	var b strings.Builder
	fmt.Fprintf(&b, "- name: %s\n  sha256: %s\n", strconv.Quote(k.Name), k.SHA256)
	number := func(name string, n int64) {
		if n != 0 {
			fmt.Fprintf(&b, "  %s: %d\n", name, n)
		}
	}
	number("requests_per_minute", k.RequestsPerMinute)
	number("tokens_per_minute", k.TokensPerMinute)
	number("max_in_flight", int64(k.MaxInFlight))
	if k.Weight != 0 {
		fmt.Fprintf(&b, "  weight: %v\n", k.Weight)
	}
	if k.Priority != "" {
		fmt.Fprintf(&b, "  priority: %s\n", k.Priority)
	}
	if k.TTFTPromise != 0 {
		fmt.Fprintf(&b, "  ttft_promise: %v\n", k.TTFTPromise)
	}
	if k.TPOTPromise != 0 {
		fmt.Fprintf(&b, "  tpot_promise: %v\n", k.TPOTPromise)
	}
	if k.ITLPromise != 0 {
		fmt.Fprintf(&b, "  itl_promise: %v\n", k.ITLPromise)
	}
	if len(k.Models) > 0 {
		quoted := make([]string, len(k.Models))
		for i, m := range k.Models {
			quoted[i] = strconv.Quote(m)
		}
		fmt.Fprintf(&b, "  models: [%s]\n", strings.Join(quoted, ", "))
	}
	if k.Cache != "" {
		fmt.Fprintf(&b, "  cache: %s\n", strconv.Quote(k.Cache))
	}
	if k.NamesTenants {
		b.WriteString("  names_tenants: true\n")
	}
	if !k.Expires.IsZero() {
		fmt.Fprintf(&b, "  expires: %s\n", k.Expires.UTC().Format("2006-01-02T15:04:05Z"))
	}
	return b.String()
}
