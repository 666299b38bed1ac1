package kvconntest

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"slices"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/kvconn"
)

// This file proves fleet membership as DESIGN.md describes it, without a line of
// internal/trust's handshake.

const (
	wants         = "xpyd-kv wants a fleet secret 1\n"
	challengeSize = len(wants) + 1 + 2*4 + 32 + 32
	proofSize     = 32
)

// secretOf is a fleet's secret: 32 times the byte.
func secretOf(b byte) trust.Secret {
	s, err := trust.ParseSecret(base64.RawURLEncoding.EncodeToString(bytes.Repeat([]byte{b}, 32)))
	if err != nil {
		panic(err)
	}
	return s
}

// ringOf is nil without secrets.
func ringOf(secrets ...byte) *trust.Ring {
	if len(secrets) == 0 {
		return nil
	}
	var all []trust.Secret
	for _, b := range secrets {
		all = append(all, secretOf(b))
	}
	r, err := trust.NewRing(all...)
	if err != nil {
		panic(err)
	}
	return r
}

// fleetSecret is that of the peers of a World.
const fleetSecret = 0x42

func derive(secret byte, purpose string, n int) []byte {
	key, err := hkdf.Key(sha256.New, bytes.Repeat([]byte{secret}, 32), nil, "xpyd "+purpose+"\x00", n)
	if err != nil {
		panic(err)
	}
	return key
}

// Challenge is what an end says first.
func Challenge(secret byte, self kvconn.PeerID) []byte {
	name := sha256.Sum256([]byte(self.String()))
	nonce := make([]byte, 32)
	rand.Read(nonce) // never fails (crypto/rand)
	return slices.Concat([]byte(wants), []byte{1}, derive(secret, "id", 4), make([]byte, 4), name[:], nonce)
}

// Prove is an end's proof: of a listener's with what both have said, of a dialler's also
// with the listener's proof.
func Prove(secret byte, end string, said ...[]byte) []byte {
	h := hmac.New(sha256.New, derive(secret, "kv", 32))
	h.Write([]byte("xpyd-kv " + end + "\x00"))
	for _, b := range said {
		h.Write(b)
	}
	return h.Sum(nil)
}

// Greet proves to the listener that self is of the fleet, sends a banner and reads the
// peer's.
func (c *RawConn) Greet(self kvconn.PeerID, banner string) (string, error) {
	ours := Challenge(fleetSecret, self)
	if _, err := c.Write(ours); err != nil {
		return "", err
	}
	theirs, proof, err := c.challenged()
	if err != nil {
		return "", err
	}
	if !bytes.Equal(proof, Prove(fleetSecret, "listener", ours, theirs)) {
		return "", errors.New("the listener's proof is wrong")
	}
	if _, err := c.Write(append(Prove(fleetSecret, "dialler", ours, theirs, proof), banner...)); err != nil {
		return "", err
	}
	return c.r.ReadString('\n')
}

// challenged reads a listener's challenge and its proof.
func (c *RawConn) challenged() (theirs, proof []byte, err error) {
	b, err := c.read(challengeSize + proofSize)
	if err != nil {
		return nil, nil, err
	}
	return b[:challengeSize], b[challengeSize:], nil
}

// Welcome is the listener's end of Greet, without the peer's banner.
func (c *RawConn) Welcome(self kvconn.PeerID, banner string) error {
	theirs, err := c.read(challengeSize)
	if err != nil {
		return err
	}
	ours := Challenge(fleetSecret, self)
	proof := Prove(fleetSecret, "listener", theirs, ours)
	if _, err := c.Write(slices.Concat(ours, proof, []byte(banner))); err != nil {
		return err
	}
	shown, err := c.read(proofSize)
	if err != nil {
		return err
	}
	if !bytes.Equal(shown, Prove(fleetSecret, "dialler", theirs, ours, proof)) {
		return errors.New("the dialler's proof is wrong")
	}
	return nil
}
