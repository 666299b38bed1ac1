package kvevents

import "github.com/tinylib/msgp/msgp"

// Ping is how an engine with vLLM's legacy P2pNccl connector registers.
type Ping struct {
	Type string // "P" or "D"
	HTTP string // host:port of its API
	ZMQ  string // host:port of its connector
}

const maxPing = 4 << 10

// DecodePing reads {"type", "http_address", "zmq_address"} and skips other fields.
func DecodePing(b []byte) (Ping, error) {
	r, p := &reader{b: b}, Ping{}
	if len(b) > maxPing {
		r.fail("a ping of %d bytes", len(b))
	}
	for n := r.fields(); n > 0 && r.err == nil; n-- {
		switch key := r.text(); {
		case key == "type" && r.isText():
			p.Type = r.text()
		case key == "http_address" && r.isText():
			p.HTTP = r.text()
		case key == "zmq_address" && r.isText():
			p.ZMQ = r.text()
		default:
			r.skip()
		}
	}
	if err := r.end(); err != nil {
		return Ping{}, err
	}
	return p, nil
}

// Append encodes a ping.
func (p Ping) Append(dst []byte) []byte {
	dst = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(dst, 3), "type"), p.Type)
	dst = msgp.AppendString(msgp.AppendString(dst, "http_address"), p.HTTP)
	return msgp.AppendString(msgp.AppendString(dst, "zmq_address"), p.ZMQ)
}
