package zmtp

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"slices"

	"golang.org/x/crypto/nacl/secretbox"
)

// The commands of CURVE's handshake, without their names. As in CurveZMQ, S and C are the
// long-term keys of server and client, S' and C' those of the connection, small letters
// their private parts, and Box[X](a->B) is X sealed with what a and B agree on.

// Sizes of the commands. INITIATE and READY end with metadata.
const (
	cookieBytes = 96
	helloBytes  = 2 + 72 + keyBytes + 8 + 64 + overhead
	welcomeSize = 16 + keyBytes + cookieBytes + overhead
	vouchBytes  = 16 + 2*keyBytes + overhead
	initiateMin = cookieBytes + 8 + keyBytes + vouchBytes + overhead
	readyMin    = 8 + overhead
)

func malformed(name string, size int) error {
	return fmt.Errorf("%w: a %s of %d bytes", ErrProtocol, name, size)
}

func notForUs(name string) error {
	return fmt.Errorf("%w: a %s that our keys do not open", ErrProtocol, name)
}

// random appends n random bytes.
func random(b []byte, n int) []byte {
	at := len(b)
	b = append(b, make([]byte, n)...)
	rand.Read(b[at:]) // never fails (crypto/rand)
	return b
}

// appendHello: version 1.0, padding, C', nonce, Box[64 zeros](c'->S).
func appendHello(b []byte, short *ecdh.PublicKey, toServer *[keyBytes]byte, n uint64) []byte {
	b = append(append(b, 1, 0), make([]byte, 72)...)
	b = append(b, short.Bytes()...)
	b = binary.BigEndian.AppendUint64(b, n)
	return secretbox.Seal(b, make([]byte, 64), nonce(nonceHello, b[len(b)-8:]), toServer)
}

// hello is what a server knows of a client that has found one of its doors.
type hello struct {
	door  *Door
	key   *[keyBytes]byte // agreed on by s and C'
	short *ecdh.PublicKey // C'
	n     uint64
}

// openHello finds the door that the client addressed. Without one the client is a stranger
// (ErrKey).
func openHello(b []byte, doors []Door) (*hello, error) {
	if len(b) != helloBytes {
		return nil, malformed("HELLO", len(b))
	}
	if b[0] != 1 || b[1] != 0 {
		return nil, fmt.Errorf("%w: the peer speaks CurveZMQ %d.%d", ErrProtocol, b[0], b[1])
	}
	h := &hello{short: publicKey(b[74:]), n: binary.BigEndian.Uint64(b[106:])}
	for i := range doors {
		key, err := agree(doors[i].Key, h.short)
		if err != nil {
			return nil, err
		}
		zeros, ok := secretbox.Open(nil, b[114:], nonce(nonceHello, b[106:114]), key)
		if ok && bytes.Equal(zeros, make([]byte, 64)) {
			h.door, h.key = &doors[i], key
			return h, nil
		}
	}
	return nil, fmt.Errorf("%w: it knows no key of ours", ErrKey)
}

// appendWelcome: nonce, Box[S' + cookie](s->C').
func appendWelcome(b []byte, short *ecdh.PublicKey, cookie []byte, key *[keyBytes]byte) []byte {
	b = random(b, 16)
	return secretbox.Seal(b, append(short.Bytes(), cookie...), nonce(nonceWelcome, b[len(b)-16:]), key)
}

// openWelcome returns S' and the cookie.
func openWelcome(b []byte, toServer *[keyBytes]byte) (short *ecdh.PublicKey, cookie []byte, err error) {
	if len(b) != welcomeSize {
		return nil, nil, malformed("WELCOME", len(b))
	}
	plain, ok := secretbox.Open(nil, b[16:], nonce(nonceWelcome, b[:16]), toServer)
	if !ok {
		return nil, nil, notForUs("WELCOME")
	}
	return publicKey(plain), plain[keyBytes:], nil
}

// appendVouch: nonce, Box[C' + S](c->S'), by which the holder of c states that c' is its
// own, for this server alone.
func appendVouch(b []byte, k *Keys, short, server *ecdh.PublicKey) ([]byte, error) {
	key, err := agree(k.Own, server)
	if err != nil {
		return nil, err
	}
	b = random(b, 16)
	return secretbox.Seal(b, append(short.Bytes(), k.Server.Bytes()...), nonce(nonceVouch, b[len(b)-16:]), key), nil
}

// appendInitiate: cookie, nonce, Box[C + vouch + metadata](c'->S').
func appendInitiate(b, cookie, vouch, meta []byte, own *ecdh.PublicKey, key *[keyBytes]byte, n uint64) []byte {
	b = append(b, cookie...)
	b = binary.BigEndian.AppendUint64(b, n)
	return secretbox.Seal(b, slices.Concat(own.Bytes(), vouch, meta), nonce(nonceInitiate, b[len(b)-8:]), key)
}

// initiate is the content of INITIATE.
type initiate struct {
	client *ecdh.PublicKey // C
	meta   []byte
	n      uint64
}

// openInitiate reads the reply to a WELCOME with cookie; key is agreed on by s' and C'. It proves
// that the client holds the private part of C, not that C may come in.
func openInitiate(b, cookie []byte, h *hello, short *ecdh.PrivateKey, key *[keyBytes]byte) (*initiate, error) {
	if len(b) < initiateMin {
		return nil, malformed("INITIATE", len(b))
	}
	if subtle.ConstantTimeCompare(b[:cookieBytes], cookie) != 1 {
		return nil, fmt.Errorf("%w: another cookie", ErrProtocol)
	}
	b = b[cookieBytes:]
	i := &initiate{n: binary.BigEndian.Uint64(b)}
	if i.n <= h.n {
		return nil, fmt.Errorf("%w: nonce %d after %d", ErrProtocol, i.n, h.n)
	}
	plain, ok := secretbox.Open(nil, b[8:], nonce(nonceInitiate, b[:8]), key)
	if !ok {
		return nil, notForUs("INITIATE")
	}
	i.client, i.meta = publicKey(plain), plain[keyBytes+vouchBytes:]
	vouch := plain[keyBytes : keyBytes+vouchBytes]
	key, err := agree(short, i.client)
	if err != nil {
		return nil, err
	}
	said, ok := secretbox.Open(nil, vouch[16:], nonce(nonceVouch, vouch[:16]), key)
	if !ok || !bytes.Equal(said, append(h.short.Bytes(), h.door.Key.PublicKey().Bytes()...)) {
		return nil, fmt.Errorf("%w: a vouch for somebody else", ErrProtocol)
	}
	return i, nil
}

// appendReady: nonce, Box[metadata](s'->C').
func appendReady(b, meta []byte, key *[keyBytes]byte, n uint64) []byte {
	b = binary.BigEndian.AppendUint64(b, n)
	return secretbox.Seal(b, meta, nonce(nonceReady, b[len(b)-8:]), key)
}

// openReady returns the metadata.
func openReady(b []byte, key *[keyBytes]byte) (meta []byte, n uint64, err error) {
	if len(b) < readyMin {
		return nil, 0, malformed("READY", len(b))
	}
	meta, ok := secretbox.Open(nil, b[8:], nonce(nonceReady, b[:8]), key)
	if !ok {
		return nil, 0, notForUs("READY")
	}
	return meta, binary.BigEndian.Uint64(b), nil
}
