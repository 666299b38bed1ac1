package zmtp

// maxClients bounds a Router's connections.
const maxClients = 8192

// Router is a listening ROUTER socket, for DEALER and REQ sockets.
type Router struct{ server }

// Handler handles one message of a peer, on its connection's goroutine; frames are valid until
// it returns. reply answers on the same connection, and an error ends it.
type Handler func(p Peer, frames [][]byte, reply func(frames ...[]byte) error) error

// ListenRouter listens on host:port; port 0 takes a free one.
func ListenRouter(addr string, cfg Config, h Handler) (*Router, error) {
	r := &Router{}
	return r, r.listen(addr, RouterType, cfg, maxClients, func(c *Conn) {
		var frames [][]byte
		var err error
		for err == nil {
			if frames, err = c.ReadMessage(frames); err == nil {
				err = h(c.Peer(), frames, c.WriteMessage)
			}
		}
	})
}
