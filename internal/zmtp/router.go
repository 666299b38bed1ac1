package zmtp

import "net"

// maxClients bounds a Router's connections.
const maxClients = 8192

// Router is a listening ROUTER socket: DEALER and REQ sockets talk to it, each on its own
// goroutine.
type Router struct{ server }

// Handler handles one message of a peer; frames are valid until it returns. It replies with
// reply, on the same connection. An error ends the connection.
type Handler func(p Peer, frames [][]byte, reply func(frames ...[]byte) error) error

// ListenRouter listens on host:port; port 0 takes a free one.
func ListenRouter(addr string, cfg Config, h Handler) (*Router, error) {
	cfg.Type = RouterType
	cfg = cfg.withDefaults()
	r := &Router{}
	r.server = server{cfg: cfg, most: maxClients, run: func(c *Conn) {
		var frames [][]byte
		for {
			var err error
			if frames, err = c.ReadMessage(frames); err != nil {
				return
			}
			if h(c.Peer(), frames, c.WriteMessage) != nil {
				return
			}
		}
	}}
	if err := r.listen(addr); err != nil {
		return nil, err
	}
	return r, nil
}

// Addr returns the listener's address.
func (r *Router) Addr() net.Addr { return r.ln.Addr() }

// Close ends all connections, and waits.
func (r *Router) Close() error { return r.close() }
