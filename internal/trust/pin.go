package trust

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"slices"
)

// A pinned connection is TLS 1.3 in which both ends show a key derived from a secret of the fleet,
// and accept no other. A man in the middle has no such key, so he can neither read nor write, nor
// use what he has heard. There is no CA, name or date.

const pinHost = ".xpyd" // behind the secret's ID, in the name that the client asks for

// Ends of a pinned connection. Each has its own key, so that nobody can reflect a proof.
const (
	pinServer = "server"
	pinClient = "client"
	pinPeer   = "peer" // of servers that dial each other
)

// pin is the key of one end.
func (s Secret) pin(end string) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed(s.Key(pinned, end, ed25519.SeedSize))
}

// certificate wraps the key as TLS wants it.
func (s Secret) certificate(end string) (*tls.Certificate, error) {
	key := s.pin(end)
	form := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, form, form, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("pinned certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// PinError means that the peer does not show the fleet's key.
type PinError struct{}

func (*PinError) Error() string { return "the other end does not have the fleet secret" }

// holds returns a check that the peer shows the key of one of these secrets.
func holds(end string, secrets ...Secret) func(tls.ConnectionState) error {
	return func(c tls.ConnectionState) error {
		if len(c.PeerCertificates) > 0 {
			if key, ok := c.PeerCertificates[0].PublicKey.(ed25519.PublicKey); ok {
				for _, s := range secrets {
					if key.Equal(s.pin(end).Public()) {
						return nil
					}
				}
			}
		}
		return &PinError{}
	}
}

// PinnedClient is for dialled connections: both ends show the key of s.
func PinnedClient(s Secret) (*tls.Config, error) {
	cert, err := s.certificate(pinClient)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		ServerName:         s.ID() + pinHost,
		InsecureSkipVerify: true, // which would want a CA; the key is looked at
		VerifyConnection:   holds(pinServer, s),
		Certificates:       []tls.Certificate{*cert},
	}, nil
}

// PinnedServer is for accepted connections: the client asks for one of the ring's secrets, and both
// ends show its key.
func (r *Ring) PinnedServer() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			s, ok := r.pinnedTo(hello.ServerName)
			if !ok {
				return nil, &PinError{}
			}
			return s.accepts(pinServer, holds(pinClient, s))
		},
	}
}

// accepts is for one connection: this end shows the secret's key, and verify checks the other's.
func (s Secret) accepts(end string, verify func(tls.ConnectionState) error, protos ...string) (*tls.Config, error) {
	cert, err := s.certificate(end)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		ClientAuth:             tls.RequireAnyClientCert, // verify looks at the key
		VerifyConnection:       verify,
		Certificates:           []tls.Certificate{*cert},
		NextProtos:             protos,
		SessionTicketsDisabled: true, // every connection proves itself
	}, nil
}

// pinnedTo is the secret that a client asks for.
func (r *Ring) pinnedTo(name string) (Secret, bool) {
	all := r.Secrets()
	if i := slices.IndexFunc(all, func(s Secret) bool { return s.ID()+pinHost == name }); i >= 0 {
		return all[i], true
	}
	return Secret{}, false
}

// PinnedBy returns the secret of a PinnedServer's connection; false if the ring lacks it by now.
func (r *Ring) PinnedBy(c tls.ConnectionState) (Secret, bool) { return r.pinnedTo(c.ServerName) }

// PinnedPeers is for servers that dial each other under names of their own. The dialler
// offers the ring's secrets and shows the older of two, which the other has had longer; the
// listener shows one that was offered.
func (r *Ring) PinnedPeers() *tls.Config {
	accept := func(c tls.ConnectionState) error { return holds(pinPeer, r.Secrets()...)(c) }
	conf := &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // which would want a CA; the key is looked at
		VerifyConnection:   accept,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			all := r.Secrets()
			return all[len(all)-1].certificate(pinPeer)
		},
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			for _, name := range hello.SupportedProtos {
				if s, ok := r.pinnedTo(name); ok {
					return s.accepts(pinPeer, accept, name)
				}
			}
			return nil, &PinError{}
		},
	}
	for _, s := range r.Secrets() {
		conf.NextProtos = append(conf.NextProtos, s.ID()+pinHost)
	}
	return conf
}

// Refused reports whether a handshake failed because one end lacks or does not accept the secret.
func Refused(err error) bool {
	var pin *PinError
	var header tls.RecordHeaderError // it does not speak TLS
	var op *net.OpError
	return errors.As(err, &pin) || errors.As(err, &header) ||
		errors.As(err, &op) && op.Op == "remote error" // crypto/tls's word for an alert
}
