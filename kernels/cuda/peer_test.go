//go:build cuda && cgo && linux

package cuda_test

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cuda"
)

// The two processes of TestPeerProcess know the same model and prompt, so the
// receiver can compute what it should get.
const peerPrompt = 16*20 + 7

func peerModel() (arch.Config, kernels.Weights, []int32) {
	a := families()["llama gqa4 128"]
	return a, randomWeights(a, 1), randomTokens(rand.New(rand.NewPCG(5, 6)), peerPrompt, a.Vocab)
}

// openParent is how the other process of a test begins: it opens its parent's pool,
// whose flags are its file 3, from a pool of its own, on another GPU where there is
// one.
func openParent(handle string, bytes int64) (*cuda.Backend, kernels.Peer, error) {
	h, err := hex.DecodeString(handle)
	if err != nil {
		return nil, nil, err
	}
	flags, err := unix.Mmap(3, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	a, w, _ := peerModel()
	b, err := cuda.New(a, w, cuda.Options{Blocks: 64, Device: 1, MaxSeqs: 16})
	if err != nil { // one GPU: the two share it
		b, err = cuda.New(a, w, cuda.Options{Blocks: 64, MaxSeqs: 16})
	}
	if err != nil {
		return nil, nil, err
	}
	p, err := b.OpenPeer(h, flags)
	if err != nil {
		return nil, nil, errors.Join(err, b.Close())
	}
	return b, p, nil
}

// child is the other process of a test: the same test, with the pool's handle in a
// variable.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

// beget starts it, with more environment variables.
func beget(t *testing.T, test, variable string, e kernels.Export, more ...string) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.CommandContext(soon(t), os.Args[0], "-test.run", "^"+test+"$")}
	c.cmd.Env = append(append(os.Environ(), variable+"="+hex.EncodeToString(e.Handle)), more...)
	file := os.NewFile(uintptr(mustDup(t, e.FD)), "flags")
	defer file.Close()
	c.cmd.ExtraFiles, c.cmd.Stderr = []*os.File{file}, os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		c.in, err = c.cmd.StdinPipe()
	}
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	c.lines = bufio.NewScanner(out)
	c.says("ready")
	return c
}

func (c *child) says(want string) {
	c.t.Helper()
	if !c.lines.Scan() || c.lines.Text() != want {
		c.t.Fatalf("the sender says %q, want %q", c.lines.Text(), want)
	}
}

// push has it push into these blocks.
func (c *child) push(dst []int32) { fmt.Fprintln(c.in, strings.Trim(fmt.Sprint(dst), "[]")) }

// end has it exit, and waits for that.
func (c *child) end() {
	c.t.Helper()
	c.in.Close()
	for c.lines.Scan() {
	}
	if err := c.cmd.Wait(); err != nil {
		c.t.Fatal(err)
	}
}

// sender is the other process: it computes the prompt and pushes it layer by layer,
// behind the step and not.
func sender(handle string, bytes int64) error {
	b, p, err := openParent(handle, bytes)
	if err != nil {
		return err
	}
	defer b.Close()
	defer p.Close(context.Background())
	a, _, tokens := peerModel()
	in := bufio.NewScanner(os.Stdin)
	fmt.Println("ready")
	for value := uint64(0); in.Scan(); {
		var list []kernels.BlockPair
		var blocks []int32
		for i, f := range strings.Fields(in.Text()) {
			var dst int32
			if _, err := fmt.Sscan(f, &dst); err != nil {
				return err
			}
			src := int32(63 - i)
			list, blocks = append(list, kernels.BlockPair{Src: src, Dst: dst}), append(blocks, src)
		}
		if err := b.Launch(&kernels.Step{Seqs: []kernels.Seq{{Tokens: tokens, Blocks: blocks}}, OnLayer: func(int) {}}); err != nil {
			return err
		}
		for layer := range a.Layers {
			value++
			if err := p.Push(&kernels.Push{FirstLayer: layer, Layers: 1, Blocks: list, Line: 9, Value: value, AfterStep: true}); err != nil {
				return err
			}
		}
		if _, err := b.Await(); err != nil {
			return err
		}
		fmt.Println("pushed")
	}
	if err := p.Drain(context.Background()); err != nil {
		return err
	}
	return p.Close(context.Background())
}

// Two processes, on two GPUs where there are two: what one computes and pushes
// is in the other's pool when the flag says so, good and equal to the bit, while
// the other goes on stepping; and the blocks around it are untouched.
func TestPeerProcess(t *testing.T) {
	if h := os.Getenv("XPYD_TEST_PEER"); h != "" {
		var bytes int64
		fmt.Sscan(os.Getenv("XPYD_TEST_PEER_BYTES"), &bytes)
		if err := sender(h, bytes); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	a, w, tokens := peerModel()
	b := open(t, a, w, cuda.Options{Blocks: 200})
	e, err := b.Export()
	if err != nil {
		t.Fatal(err)
	}
	other := beget(t, "TestPeerProcess", "XPYD_TEST_PEER", e, fmt.Sprint("XPYD_TEST_PEER_BYTES=", e.Bytes))
	// What should come, computed here.
	const n = (peerPrompt + 15) / 16
	own := make([]int32, n)
	for i := range own {
		own[i] = int32(i)
	}
	mustStep(t, b, kernels.Seq{Tokens: tokens, Blocks: own})
	l := b.Layout()
	r := rand.New(rand.NewPCG(1, 1))
	const rounds = 20
	for round := range rounds {
		dst := make([]int32, n)
		for i, k := range r.Perm(150)[:n] {
			dst[i] = int32(50 + k)
		}
		before := imageOf(b)
		other.push(dst)
		for range 5 { // decode goes on meanwhile
			mustStep(t, b, kernels.Seq{Tokens: tokens[:3], Pos: 2, Blocks: []int32{30}})
		}
		named := map[int]int{}
		for layer := range a.Layers {
			if err := b.AwaitFlag(soon(t), 9, uint64(round*a.Layers+layer+1)); err != nil {
				t.Fatal(err)
			}
			var list []kernels.Landed
			for i, d := range dst {
				list = append(list, kernels.Landed{Layer: layer, Block: d, FirstPos: 16 * i, Rows: min(16, peerPrompt-16*i)})
				named[layer*200+int(d)] = layer*200 + i
			}
			good, err := b.Verify(soon(t), list)
			if err != nil {
				t.Fatal(err)
			}
			for i, g := range good {
				if !g {
					t.Fatalf("round %d layer %d: block %d is bad", round, layer, i)
				}
			}
		}
		other.says("pushed")
		now := imageOf(b)
		for i := range now.rows {
			want := before.rows[i]
			rows := 16
			if from, ok := named[i]; ok {
				want, rows = before.rows[from], min(16, peerPrompt-from%200*16)
			}
			if i%200 == 30 {
				continue // decode's
			}
			for h := range 2 * l.Resolve()[0].Heads {
				at := h * 16 * l.Resolve()[0].RowBytes(0)
				if string(now.rows[i][at:at+rows*l.Resolve()[0].RowBytes(0)]) != string(want[at:at+rows*l.Resolve()[0].RowBytes(0)]) {
					t.Fatalf("round %d: layer %d block %d is not what it should be", round, i/200, i%200)
				}
			}
		}
	}
	other.end()
}

func mustDup(t *testing.T, fd int) int {
	t.Helper()
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
