package kvevents

// Ping is what an engine with vLLM's legacy P2pNccl connector registers with.
// It is no event, but the same msgpack.
type Ping struct {
	Type string // "P" or "D"
	HTTP string // host:port of its API
	ZMQ  string // host:port of its connector
}

const maxPing = 4 << 10

// DecodePing reads {"type", "http_address", "zmq_address"}; other fields are
// skipped.
func DecodePing(b []byte) (Ping, error) {
	if len(b) > maxPing {
		return Ping{}, malformed("a ping of %d bytes", len(b))
	}
	r := &reader{b}
	n, err := r.fields()
	if err != nil {
		return Ping{}, err
	}
	var p Ping
	for range n {
		key, err := r.text()
		if err != nil {
			return Ping{}, err
		}
		var to *string
		switch string(key) {
		case "type":
			to = &p.Type
		case "http_address":
			to = &p.HTTP
		case "zmq_address":
			to = &p.ZMQ
		}
		if to == nil || r.peek() != kindText {
			err = r.skip()
		} else {
			var v []byte
			v, err = r.text()
			*to = string(v)
		}
		if err != nil {
			return Ping{}, err
		}
	}
	if len(r.b) > 0 {
		return Ping{}, malformed("%d bytes after the ping", len(r.b))
	}
	return p, nil
}

// Append encodes a ping.
func (p Ping) Append(dst []byte) []byte {
	dst = appendText(appendText(appendMap(dst, 3), "type"), p.Type)
	dst = appendText(appendText(dst, "http_address"), p.HTTP)
	return appendText(appendText(dst, "zmq_address"), p.ZMQ)
}
