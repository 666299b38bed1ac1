package trust

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Greeting is the first line from an end that wants the other to prove itself. A peer that does not
// know it shows it in its error, which explains the problem. The digit is the version.
const Greeting = "xpyd-kv wants a fleet secret 1\n"

const (
	maxLine   = 32 // bytes of a first line, including the line feed
	idBytes   = 4
	nonceSize = 32
	proofSize = sha256.Size

	// A challenge: Greeting, number of secrets (u8), their IDs, hash of the sender's name, nonce.
	countAt       = len(Greeting)
	idsAt         = countAt + 1
	memberAt      = idsAt + maxSecrets*idBytes
	nonceAt       = memberAt + sha256.Size
	challengeSize = nonceAt + nonceSize
)

// Labels of proofs, so that an end's proof cannot be sent back to it as the other's.
const (
	ofListener = "xpyd-kv listener\x00"
	ofDialler  = "xpyd-kv dialler\x00"
)

// Proven is a peer that has proved to be a member of the fleet, with a name.
type Proven struct {
	member [sha256.Size]byte
	by     string // ID of the secret
}

// Is reports whether its name is member; see Member.
func (p Proven) Is(member string) bool { return p.member == nameOf(member) }

// Same reports whether q is the same member, by any secret.
func (p Proven) Same(q Proven) bool { return p.member == q.member }

// In reports whether its secret is in force. With a nil ring, it is.
func (p Proven) In(r *Ring) bool {
	return r == nil || slices.ContainsFunc(r.Secrets(), func(s Secret) bool { return s.ID() == p.by })
}

// Newest reports whether its secret is the newest in force. With a nil ring, it is.
func (p Proven) Newest(r *Ring) bool { return r == nil || r.Secrets()[0].ID() == p.by }

func nameOf(member string) [sha256.Size]byte { return sha256.Sum256([]byte(member)) }

// Stranger is the error about a peer that did not prove to be of our fleet. It shows nothing secret.
type Stranger struct {
	Ours, Theirs string // IDs of the secrets of either end; "": none
	Said         []byte // the peer's first line, if it was not Greeting
	Wrong        bool   // its proof is wrong
}

func (e *Stranger) Error() string {
	switch {
	case e.Said != nil:
		return fmt.Sprintf("fleet secret %s: the peer names none, and says %q", e.Ours, e.Said)
	case e.Wrong:
		return fmt.Sprintf("fleet secret %s: the peer names %s, and its proof is wrong", e.Ours, e.Theirs)
	}
	return fmt.Sprintf("no fleet secret in common: ours %s, the peer's %s", e.Ours, e.Theirs)
}

// Dial is the dialler's end of a new connection: both ends prove that they have a secret of the
// fleet, in one round trip. self is our Member; more is sent right behind our proof.
func (r *Ring) Dial(in io.Reader, out io.Writer, self string, more []byte) (Proven, error) {
	secrets := r.Secrets()
	ours := challenge(secrets, self)
	if _, err := out.Write(ours); err != nil {
		return Proven{}, err
	}
	theirs, err := readChallenge(in, ours)
	if err != nil {
		return Proven{}, err
	}
	s, ok := common(secrets, ours, theirs)
	if !ok {
		return Proven{}, &Stranger{Ours: idsOf(ours), Theirs: idsOf(theirs)}
	}
	shown, err := readProof(in)
	if err != nil {
		return Proven{}, err
	}
	if !hmac.Equal(shown, prove(s, ofListener, ours, theirs)) {
		return Proven{}, &Stranger{Ours: idsOf(ours), Theirs: idsOf(theirs), Wrong: true}
	}
	_, err = out.Write(append(prove(s, ofDialler, ours, theirs, shown), more...))
	return proven(theirs, s), err
}

// Accept is the other end of Dial. more is sent behind our proof, before the peer has shown its own.
func (r *Ring) Accept(in io.Reader, out io.Writer, self string, more []byte) (Proven, error) {
	secrets := r.Secrets()
	ours := challenge(secrets, self)
	theirs, err := readChallenge(in, ours)
	if e := (*Stranger)(nil); errors.As(err, &e) && strings.HasSuffix(string(e.Said), "\n") { // it may show our line to people
		_, _ = out.Write(ours)
	}
	if err != nil {
		return Proven{}, err
	}
	s, ok := common(secrets, theirs, ours)
	if !ok {
		_, err := out.Write(ours) // its IDs explain it
		return Proven{}, errors.Join(&Stranger{Ours: idsOf(ours), Theirs: idsOf(theirs)}, err)
	}
	proof := prove(s, ofListener, theirs, ours)
	if _, err := out.Write(slices.Concat(ours, proof, more)); err != nil {
		return Proven{}, err
	}
	shown, err := readProof(in)
	if err != nil {
		return Proven{}, err
	}
	if !hmac.Equal(shown, prove(s, ofDialler, theirs, ours, proof)) {
		return Proven{}, &Stranger{Ours: idsOf(ours), Theirs: idsOf(theirs), Wrong: true}
	}
	return proven(theirs, s), nil
}

// Line reads a peer's first line, up to the most that one may have.
func Line(in io.Reader) ([]byte, error) {
	line := make([]byte, 0, maxLine)
	for len(line) < maxLine {
		line = line[:len(line)+1]
		if _, err := io.ReadFull(in, line[len(line)-1:]); err != nil {
			return nil, err
		}
		if line[len(line)-1] == '\n' {
			break
		}
	}
	return line, nil
}

// Named reads the IDs of a peer's secrets behind a Greeting, for a process that has none itself.
func Named(in io.Reader) (string, error) {
	c, err := readRest(in)
	if err != nil {
		return "", err
	}
	return idsOf(c), nil
}

// challenge makes a new challenge.
func challenge(secrets []Secret, self string) []byte {
	c := make([]byte, challengeSize)
	copy(c, Greeting)
	c[countAt] = byte(len(secrets))
	for i, s := range secrets {
		copy(c[idsAt+i*idBytes:], s.Key(purposeID, "", idBytes))
	}
	name := nameOf(self)
	copy(c[memberAt:], name[:])
	rand.Read(c[nonceAt:]) // never fails (crypto/rand)
	return c
}

// readChallenge reads the peer's challenge; ours is for the error.
func readChallenge(in io.Reader, ours []byte) ([]byte, error) {
	line, err := Line(in)
	if err != nil {
		return nil, err
	}
	if string(line) != Greeting {
		return nil, &Stranger{Ours: idsOf(ours), Said: line}
	}
	return readRest(in)
}

// ErrChallenge means that the bytes behind a Greeting are not a challenge.
var ErrChallenge = errors.New("handshake: not a challenge")

func readRest(in io.Reader) ([]byte, error) {
	c := make([]byte, challengeSize)
	copy(c, Greeting)
	if _, err := io.ReadFull(in, c[countAt:]); err != nil {
		return nil, cut(err)
	}
	n := int(c[countAt])
	if n < 1 || n > maxSecrets {
		return nil, fmt.Errorf("%w: of %d secrets", ErrChallenge, n)
	}
	for _, b := range c[idsAt+n*idBytes : memberAt] {
		if b != 0 {
			return nil, fmt.Errorf("%w: more IDs than secrets", ErrChallenge)
		}
	}
	return c, nil
}

func readProof(in io.Reader) ([]byte, error) {
	p := make([]byte, proofSize)
	_, err := io.ReadFull(in, p)
	return p, cut(err)
}

// cut turns EOF, in a handshake that has begun, into ErrUnexpectedEOF.
func cut(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// common returns the first of the dialler's secrets that the listener has too. Each end finds it
// among its own secrets.
func common(secrets []Secret, dialler, listener []byte) (Secret, bool) {
	theirs := strings.Split(idsOf(listener), "+")
	for id := range strings.SplitSeq(idsOf(dialler), "+") {
		at := slices.IndexFunc(secrets, func(s Secret) bool { return s.ID() == id })
		if at >= 0 && slices.Contains(theirs, id) {
			return secrets[at], true
		}
	}
	return Secret{}, false
}

// prove is HMAC-SHA256 under the secret's key for connections.
func prove(s Secret, label string, said ...[]byte) []byte {
	h := hmac.New(sha256.New, s.Key(KV, "", sha256.Size))
	h.Write([]byte(label))
	for _, b := range said {
		h.Write(b)
	}
	return h.Sum(nil)
}

func idsOf(challenge []byte) string {
	ids := make([]string, challenge[countAt])
	for i := range ids {
		ids[i] = hex.EncodeToString(challenge[idsAt+i*idBytes:][:idBytes])
	}
	return strings.Join(ids, "+")
}

func proven(challenge []byte, by Secret) (p Proven) {
	copy(p.member[:], challenge[memberAt:])
	p.by = by.ID()
	return p
}
