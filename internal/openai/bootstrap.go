package openai

import (
	"fmt"
	"math"

	"github.com/xpyd/xpyd/internal/jsonscan"
)

// Bootstrap is how a router of SGLang's protocol, which sends the same request to prefill and decode at
// once, lets the two meet: at prefill's bootstrap address, in a room. Each list has an entry for each
// prompt, or one for all; nil when absent or null.
type Bootstrap struct {
	Hosts []string
	Ports []int   // 0: the field is null, the engine's default
	Rooms []int64 // 0 to 2^63-1
}

// Bounds of bootstrap fields.
const (
	maxRooms = 4096 // SGLang repeats rooms for n
	maxHost  = 255  // bytes: of a name in the DNS
)

// bootstrap reads one field of s.Bootstrap.
func (p *parser) bootstrap(s *Sampling, field string) {
	b := s.Bootstrap
	if b == nil {
		b = &Bootstrap{}
	}
	switch field {
	case "bootstrap_host":
		b.Hosts = nil
		p.oneOrList(field, func(name string) {
			host := p.string(name)
			if len(host) > maxHost {
				p.refuse(field, "%s is longer than %d bytes", name, maxHost)
			}
			b.Hosts = append(b.Hosts, host)
		})
	case "bootstrap_port":
		b.Ports = nil
		p.oneOrList(field, func(name string) { b.Ports = append(b.Ports, p.intOr(name, 0, 1, math.MaxUint16)) })
	default:
		b.Rooms = nil
		p.oneOrList(field, func(name string) {
			room, given := p.int(name, 0, math.MaxInt64)
			if !given {
				p.refuse(field, "%s must be an integer, not null", name)
			}
			b.Rooms = append(b.Rooms, room)
		})
	}
	s.Bootstrap = nil
	if b.Hosts != nil || b.Ports != nil || b.Rooms != nil {
		s.Bootstrap = b
	}
}

// oneOrList reads a value or a list of them by one, which is given its name; null alone is nothing.
func (p *parser) oneOrList(field string, one func(name string)) {
	switch p.Peek() {
	case jsonscan.Null:
		p.Next()
		return
	case jsonscan.Array:
	default:
		one(field)
		return
	}
	p.Next()
	for n := 0; p.Item(); n++ {
		if n == maxRooms {
			p.refuse(field, "%s has more than %d entries", field, maxRooms)
		}
		one(fmt.Sprintf("%s[%d]", field, n))
	}
}
