package zmtp

import (
	"crypto/ecdh"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/crypto/nacl/secretbox"
	"golang.org/x/crypto/salsa20/salsa" //nolint:staticcheck // CURVE is NaCl's box, whose key HSalsa20 makes; nacl/box would not refuse keys of low order
)

// Door is a long-term key of a server and the clients that it admits: those that know its
// public part and hold one of the keys.
type Door struct {
	Key     *ecdh.PrivateKey // Curve25519, as all keys here
	Clients []*ecdh.PublicKey
}

// Keys are a client's: its own long-term key, and the server's.
type Keys struct {
	Own    *ecdh.PrivateKey
	Server *ecdh.PublicKey
}

// Prefixes of the last 8 or 16 bytes of a nonce.
const (
	nonceHello    = "CurveZMQHELLO---"
	nonceWelcome  = "WELCOME-"
	nonceInitiate = "CurveZMQINITIATE"
	nonceVouch    = "VOUCH---"
	nonceReady    = "CurveZMQREADY---"
	nonceToServer = "CurveZMQMESSAGEC"
	nonceToClient = "CurveZMQMESSAGES"
)

const (
	keyBytes = 32
	overhead = secretbox.Overhead
)

// nonce joins a prefix and the part that is sent.
func nonce(prefix string, sent []byte) *[24]byte {
	var n [24]byte
	copy(n[copy(n[:], prefix):], sent)
	return &n
}

// agree is NaCl's crypto_box_beforenm as in libsodium: it refuses a public key of low
// order, which makes the outcome known to all. box.Precompute would accept it.
func agree(ours *ecdh.PrivateKey, theirs *ecdh.PublicKey) (*[keyBytes]byte, error) {
	raw, err := ours.ECDH(theirs)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrProtocol, err)
	}
	key, zero := [keyBytes]byte(raw), [16]byte{}
	salsa.HSalsa20(&key, &zero, &key, &salsa.Sigma)
	return &key, nil
}

// publicKey reads the key of 32 bytes at the front of b.
func publicKey(b []byte) *ecdh.PublicKey {
	k, err := ecdh.X25519().NewPublicKey(b[:keyBytes])
	if err != nil { // only the length can be wrong
		panic(err)
	}
	return k
}

// session seals and opens a connection's messages after its handshake. The two directions
// share nothing that changes.
type session struct {
	key              [keyBytes]byte
	toPeer, fromPeer string // prefixes of nonces
	sent, heard      uint64
	plain            []byte
}

// Flags within a MESSAGE.
const (
	sealedMore    = 1
	sealedCommand = 2
)

const (
	nameMessage = "\x07MESSAGE"
	// sealing is how much a frame's body grows: name, nonce, authenticator and flags.
	sealing = len(nameMessage) + 8 + overhead + 1
)

// appendFrame encodes one frame as MESSAGE.
func (s *session) appendFrame(dst []byte, flags byte, body []byte) []byte {
	inner := byte(0)
	if flags&flagMore != 0 {
		inner |= sealedMore
	}
	if flags&flagCommand != 0 {
		inner |= sealedCommand
	}
	s.sent++
	plain := append(append(s.plain, inner), body...)
	s.plain = kept(plain)
	dst = slices.Grow(dst, 9+len(body)+sealing)
	dst = appendHeader(dst, 0, len(body)+sealing)
	dst = append(dst, nameMessage...)
	dst = binary.BigEndian.AppendUint64(dst, s.sent)
	return secretbox.Seal(dst, plain, nonce(s.toPeer, dst[len(dst)-8:]), &s.key)
}

// open appends the content of a MESSAGE to buf.
func (s *session) open(buf, b []byte) (flags byte, out []byte, err error) {
	if len(b) < sealing || string(b[:len(nameMessage)]) != nameMessage {
		return 0, buf, fmt.Errorf("%w: no MESSAGE", ErrProtocol)
	}
	b = b[len(nameMessage):]
	n := binary.BigEndian.Uint64(b)
	if n <= s.heard {
		return 0, buf, fmt.Errorf("%w: nonce %d after %d", ErrProtocol, n, s.heard)
	}
	at := len(buf)
	out, ok := secretbox.Open(buf, b[8:], nonce(s.fromPeer, b[:8]), &s.key)
	if !ok {
		return 0, buf, fmt.Errorf("%w: a MESSAGE that is not the peer's", ErrProtocol)
	}
	s.heard = n
	inner := out[at]
	out = slices.Delete(out, at, at+1)
	switch inner {
	case 0:
	case sealedMore:
		flags = flagMore
	case sealedCommand:
		flags = flagCommand
	default:
		return 0, out[:at], fmt.Errorf("%w: flags %#02x in a MESSAGE", ErrProtocol, inner)
	}
	return flags, out, nil
}
