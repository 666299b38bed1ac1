package kvconntest

import (
	"bufio"
	"testing"
	"testing/synctest"
	"time"
)

// What was written before or during a partition arrives when it is over, also when
// the writer's deadline is over by then.
func TestPartitionDelivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ch := NewChaos(NewMemory(3))
		ln, err := ch.Listen("")
		check(t, err)
		a, err := ch.Dial(t.Context(), ln.Addr().String())
		check(t, err)
		b, err := ln.Accept()
		check(t, err)
		ch.Sever()
		check(t, a.SetWriteDeadline(time.Now().Add(time.Second)))
		_, err = a.Write([]byte("hello\n"))
		check(t, err)
		time.Sleep(2 * time.Second)
		go ch.Heal()
		check(t, b.SetReadDeadline(time.Now().Add(time.Minute)))
		if s, err := bufio.NewReader(b).ReadString('\n'); s != "hello\n" {
			t.Errorf("%q came: %v", s, err)
		}
		a.Close()
		b.Close()
		ln.Close()
	})
}
