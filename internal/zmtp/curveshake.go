package zmtp

import (
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
)

// refusal is the reason that libzmq's servers give in ERROR for a key that is not allowed.
const refusal = "400"

// curveClient shakes hands as a client, from HELLO on.
func (c *Conn) curveClient(k *Keys) error {
	short, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	toServer, err := agree(short, k.Server)
	if err != nil {
		return err
	}
	if err := c.sendCommand("HELLO", appendHello(nil, short.PublicKey(), toServer, 1)); err != nil {
		return err
	}
	body, err := c.expect("WELCOME")
	if err != nil {
		return err
	}
	server, cookie, err := openWelcome(body, toServer)
	if err != nil {
		return err
	}
	key, err := agree(short, server)
	if err != nil {
		return err
	}
	vouch, err := appendVouch(nil, k, short.PublicKey(), server)
	if err != nil {
		return err
	}
	if err := c.sendCommand("INITIATE", appendInitiate(nil, cookie, vouch, readyBody(&c.cfg), k.Own.PublicKey(), key, 2)); err != nil {
		return err
	}
	if body, err = c.expect("READY"); err != nil {
		return err
	}
	meta, n, err := openReady(body, key)
	if err != nil {
		return err
	}
	c.session = &session{key: *key, toPeer: nonceToServer, fromPeer: nonceToClient, sent: 2, heard: n}
	return parseReady(meta, &c.peer)
}

// curveServer shakes hands as a server, from HELLO on. Strangers lack the knowledge to find a
// door; whether a client may come in by it depends on its own key. The cookie, in which a server
// may hand its state to the client, holds nothing here.
func (c *Conn) curveServer(doors []Door) error {
	body, err := c.expect("HELLO")
	if err != nil {
		return err
	}
	h, err := openHello(body, doors)
	if err != nil {
		return c.refuse(err)
	}
	if err := c.admit(); err != nil {
		return err
	}
	short, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	key, err := agree(short, h.short)
	if err != nil {
		return err
	}
	cookie := random(nil, cookieBytes)
	if err := c.sendCommand("WELCOME", appendWelcome(nil, short.PublicKey(), cookie, h.key)); err != nil {
		return err
	}
	if body, err = c.expect("INITIATE"); err != nil {
		return err
	}
	i, err := openInitiate(body, cookie, h, short, key)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(h.door.Clients, func(k *ecdh.PublicKey) bool { return k.Equal(i.client) }) {
		return c.refuse(fmt.Errorf("%w: it may not come in", ErrKey))
	}
	if err := parseReady(i.meta, &c.peer); err != nil {
		return err
	}
	if err := c.sendCommand("READY", appendReady(nil, readyBody(&c.cfg), key, 1)); err != nil {
		return err
	}
	c.session = &session{key: *key, toPeer: nonceToClient, fromPeer: nonceToServer, sent: 1, heard: i.n}
	c.door = h.door
	return nil
}

// refuse tells a client that its key is not ours, so that it need not guess.
func (c *Conn) refuse(err error) error {
	if !errors.Is(err, ErrKey) {
		return err
	}
	return errors.Join(err, c.sendCommand("ERROR", append([]byte{byte(len(refusal))}, refusal...)))
}
