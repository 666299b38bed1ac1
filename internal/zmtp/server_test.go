package zmtp_test

import (
	"net"
	"testing"

	"github.com/xpyd/xpyd/internal/zmtp"
)

// TestStrangers: however many connections say nothing, one that shakes hands comes
// in, and they do not stay either.
func TestStrangers(t *testing.T) {
	t.Run("NULL", func(t *testing.T) { strangers(t, zmtp.Config{}, nil) })
	t.Run("CURVE", func(t *testing.T) { strangers(t, zmtp.Config{Doors: doors(t, 1, 2)}, keys(t, 1, 2)) })
}

func strangers(t *testing.T, cfg zmtp.Config, k *zmtp.Keys) {
	p := curved(t, cfg)
	for range 1100 {
		c, err := net.Dial("tcp", p.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	c := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub, Keys: k})
	if err := c.Subscribe(""); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no subscriber", func() bool { return p.Subscribers() == 1 })
}

// TestSlowSubscribers: what is kept for those that do not read has a bound for all
// of them together.
func TestSlowSubscribers(t *testing.T) {
	const slow, messages = 16, 100
	p := publisher(t)
	for range slow {
		if err := dial(t, p.Addr(), zmtp.Config{Type: zmtp.Sub}).Subscribe(""); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "not all subscribed", func() bool { return p.Subscribers() == slow })
	m := make([]byte, 1<<20)
	for range messages {
		p.Publish(m)
	}
	// 16 MiB of 256 for each, and what the sockets hold.
	if n := p.Dropped(); n < slow*(messages-40) {
		t.Errorf("%d messages lost of %d", n, slow*messages)
	}
}
