package kvcache

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Grain is the step of the hash chain in tokens. It does not depend on the pool's block size,
// so that pools of different block sizes give a prefix the same name.
const Grain = 16

// domain separates our hashes from anybody else's, and versions them.
const domain = "xpyd/1"

// Hash names a token prefix, and the model, numerics and salt that its KV rows depend on:
// SHA-256 cut to 128 bits.
type Hash [16]byte

// MarshalText returns 32 hexadecimal digits.
func (h Hash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText reads what MarshalText wrote.
func (h *Hash) UnmarshalText(text []byte) error {
	if len(text) != hex.EncodedLen(len(h)) {
		return fmt.Errorf("%q is not %d hexadecimal digits", text, hex.EncodedLen(len(h)))
	}
	_, err := hex.Decode(h[:], text)
	return err
}

// Root is the hash of the empty prefix: SHA-256 over the domain, then model fingerprint,
// numerics and salt, each preceded by its length in bytes as uint32 LE.
func Root(fingerprint, numerics, salt string) Hash {
	b := make([]byte, 0, len(domain)+12+len(fingerprint)+len(numerics)+len(salt))
	b = append(b, domain...)
	for _, s := range []string{fingerprint, numerics, salt} {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(s)))
		b = append(b, s...)
	}
	return cut(b)
}

// Next extends a prefix by one grain: SHA-256 over the domain, a zero byte, the parent, and the
// Grain token ids as int32 LE.
func Next(parent Hash, tokens []int32) Hash {
	_ = tokens[Grain-1]
	var buf [len(domain) + 1 + len(parent) + 4*Grain]byte
	n := copy(buf[:], domain) + 1
	n += copy(buf[n:], parent[:])
	for i, t := range tokens[:Grain] {
		binary.LittleEndian.PutUint32(buf[n+4*i:], uint32(t))
	}
	return cut(buf[:])
}

func cut(b []byte) Hash {
	sum := sha256.Sum256(b)
	return Hash(sum[:16])
}

// Chain is the running hash of one token sequence. It belongs to one goroutine; Fork copies it
// for a sequence that goes on differently.
type Chain struct {
	// Priority is the request's: units that it stores or finds are evicted after those that
	// only requests of a lower priority stored or found.
	Priority int8

	root   Hash
	hashes []Hash // hashes[i] names the first (i+1)*Grain tokens
}

// NewChain starts a chain under this cache's model and numerics.
func (c *Cache) NewChain(salt string) Chain {
	return Chain{root: Root(c.cfg.Fingerprint, c.cfg.Numerics, salt)}
}

// Extend hashes the complete grains of tokens that are not hashed yet. tokens is the whole
// sequence.
func (ch *Chain) Extend(tokens []int32) {
	for i := len(ch.hashes); (i+1)*Grain <= len(tokens); i++ {
		ch.hashes = append(ch.hashes, Next(ch.at(i), tokens[i*Grain:]))
	}
}

// Tokens returns how many tokens are hashed.
func (ch *Chain) Tokens() int { return len(ch.hashes) * Grain }

// Fork returns an independent copy of the chain's first tokens.
func (ch *Chain) Fork(tokens int) Chain {
	n := min(tokens/Grain, len(ch.hashes))
	return Chain{Priority: ch.Priority, root: ch.root, hashes: ch.hashes[:n:n]}
}

// at names the first i grains.
func (ch *Chain) at(i int) Hash {
	if i == 0 {
		return ch.root
	}
	return ch.hashes[i-1]
}
