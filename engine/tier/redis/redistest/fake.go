package redistest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Fake is a server inside the test's process, for machines without Redis. It knows the
// commands that package redis sends, and no more. It forgets nothing by itself, and has
// one database and no password.
type Fake struct {
	url   string
	ln    net.Listener
	conns sync.WaitGroup

	mu     sync.Mutex
	values map[string]string
	open   map[net.Conn]bool // nil: it has ended
}

// StartFake runs a fake server until the test's end.
func StartFake(tb testing.TB) *Fake {
	tb.Helper()
	dir, err := os.MkdirTemp("", "redis") // a socket's path is short
	if err != nil {
		tb.Fatal(err)
	}
	f := &Fake{url: "unix://" + filepath.Join(dir, "s"), values: map[string]string{}, open: map[net.Conn]bool{}}
	if f.ln, err = net.Listen("unix", filepath.Join(dir, "s")); err != nil {
		tb.Fatal(err)
	}
	f.conns.Go(func() {
		for {
			c, err := f.ln.Accept()
			if err != nil {
				return
			}
			f.conns.Go(func() { f.serve(tb, c) })
		}
	})
	tb.Cleanup(func() {
		f.ln.Close()
		f.mu.Lock()
		for c := range f.open {
			c.Close()
		}
		f.open = nil
		f.mu.Unlock()
		f.conns.Wait()
		os.RemoveAll(dir)
	})
	return f
}

// URL is where it listens.
func (f *Fake) URL() string { return f.url }

func (f *Fake) serve(tb testing.TB, c net.Conn) {
	defer c.Close()
	f.mu.Lock()
	if f.open == nil {
		f.mu.Unlock()
		return
	}
	f.open[c] = true
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.open, c)
		f.mu.Unlock()
	}()
	r, w := bufio.NewReader(c), bufio.NewWriter(c)
	for {
		args, err := command(r)
		var reply []byte
		if err == nil {
			reply, err = f.reply(args)
		}
		if errors.Is(err, errCommand) {
			tb.Errorf("fake Redis: %v", err)
		}
		if err != nil { // the client has closed it, or the test ends
			return
		}
		_, _ = w.Write(reply) // Flush reports its error
		if r.Buffered() == 0 && w.Flush() != nil {
			return
		}
	}
}

var errCommand = errors.New("not a command that the client sends")

// command reads an array of strings.
func command(r *bufio.Reader) ([]string, error) {
	length := func(mark byte) (int, error) {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return 0, err
		}
		n, err := strconv.Atoi(string(bytes.TrimSpace(line[1:])))
		if err != nil || line[0] != mark || n < 0 {
			return 0, fmt.Errorf("%w: a line %q where %q begins one", errCommand, line, mark)
		}
		return n, nil
	}
	n, err := length('*')
	if err != nil {
		return nil, err
	}
	args := make([]string, n)
	for i := range args {
		size, err := length('$')
		if err != nil {
			return nil, err
		}
		arg := make([]byte, size+2) // with the end of the line
		if _, err := io.ReadFull(r, arg); err != nil {
			return nil, err
		}
		args[i] = string(arg[:size])
	}
	return args, nil
}

// reply carries a command out.
func (f *Fake) reply(args []string) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	is := func(verb string, n int) bool { return len(args) == n && args[0] == verb }
	text := func(v string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(v), v) }
	const none = "$-1\r\n"
	var v string
	var has bool
	if len(args) > 1 {
		v, has = f.values[args[1]]
	}
	switch {
	case is("EXISTS", 2) && has:
		return []byte(":1\r\n"), nil
	case is("EXISTS", 2):
		return []byte(":0\r\n"), nil
	case (is("GET", 2) || is("GETEX", 4)) && has:
		return []byte(text(v)), nil
	case is("GET", 2), is("GETEX", 4), is("SET", 6) && args[3] == "NX" && has:
		return []byte(none), nil
	case is("SET", 6) && args[3] == "NX":
		f.values[args[1]] = args[2]
		return []byte("+OK\r\n"), nil
	case len(args) > 0 && args[0] == "UNLINK":
		n := len(f.values)
		for _, k := range args[1:] {
			delete(f.values, k)
		}
		return fmt.Appendf(nil, ":%d\r\n", n-len(f.values)), nil
	case is("SCAN", 6) && args[2] == "MATCH": // all at once
		n, found := 0, ""
		for k := range f.values {
			if strings.HasPrefix(k, strings.TrimSuffix(args[3], "*")) {
				n, found = n+1, found+text(k)
			}
		}
		return fmt.Appendf(nil, "*2\r\n$1\r\n0\r\n*%d\r\n%s", n, found), nil
	}
	return nil, fmt.Errorf("%w: %.100q", errCommand, args)
}
