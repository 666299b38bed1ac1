package kvevents

import (
	"crypto/ecdh"
	"errors"
	"slices"
	"sync"

	"github.com/xpyd/xpyd/internal/trust"
	"github.com/xpyd/xpyd/internal/zmtp"
)

// ErrNoSecret means that the publisher asks for a fleet's secret that we do not have.
var ErrNoSecret = errors.New("the publisher asks for a fleet's secret that is not ours")

// Audiences of the Curve25519 private keys derived from a fleet's secret, 32 bytes as they come.
const (
	toPublish   = "publisher"
	toSubscribe = "subscriber"
)

func privateKey(s trust.Secret, audience string) *ecdh.PrivateKey {
	k, err := ecdh.X25519().NewPrivateKey(s.Key(trust.Events, audience, 32))
	if err != nil { // only the length can be wrong
		panic(err)
	}
	return k
}

// SubscriberKeys returns keys for a publisher that accepts the secrets that theirs names
// (trust.Ring.IDs). The error is ErrNoSecret.
func SubscriberKeys(r *trust.Ring, theirs string) (*zmtp.Keys, error) {
	if r != nil {
		if s, ok := r.Shared(theirs); ok {
			return &zmtp.Keys{Own: privateKey(s, toSubscribe), Server: privateKey(s, toPublish).PublicKey()}, nil
		}
	}
	return nil, ErrNoSecret
}

// doors are a publisher's keys: one for each secret in force.
type doors struct {
	ring *trust.Ring

	mu   sync.Mutex
	made []zmtp.Door
	from []trust.Secret
}

// now returns the doors of the secrets in force now. They are cached: any stranger's
// connection asks for them.
func (d *doors) now() []zmtp.Door {
	secrets := d.ring.Secrets()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Equal(secrets, d.from) {
		d.from, d.made = secrets, nil
		for _, s := range secrets {
			d.made = append(d.made, zmtp.Door{Key: privateKey(s, toPublish), Clients: []*ecdh.PublicKey{privateKey(s, toSubscribe).PublicKey()}})
		}
	}
	return d.made
}
