package kvconntest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/xpyd/xpyd/kvconn"
	"github.com/xpyd/xpyd/kvconn/ticket"
	"golang.org/x/sys/unix"
)

// Lossy runs transfers over a bad network: 20 ms of delay each way, 1 % of the packets
// lost, and partitions. It is the kernel's own TCP over a tunnel device in a network
// namespace, whose packets a child process delays, loses or holds, as tc's netem does,
// which few containers' kernels have. TestMain must be Main.
//
// It needs user and network namespaces; where the kernel refuses them the test logs so.
// The same partition runs through the fault layer on every transport, in Run.
func Lossy(t *testing.T, rounds int, partition time.Duration) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=lossy %d %d", childEnv, rounds, partition))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}}
	out, err := cmd.CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "error ") {
			t.Error(strings.TrimSpace(line))
		} else {
			t.Log(strings.TrimSpace(line))
		}
	}
	switch {
	case err != nil && len(out) == 0:
		t.Logf("no namespaces here, the fault layer has to do: %v", err)
	case err != nil:
		t.Error(err)
	}
}

const (
	hereAddr  = "10.9.0.1"
	thereAddr = "10.9.0.2" // reflected to hereAddr, both ways
	linkDelay = 20 * time.Millisecond
	linkLoss  = 0.01
	linkQueue = 4096 // packets under way
	linkMTU   = 1500
)

// link forwards the packets of a tunnel device.
type link struct {
	dev     *os.File
	cut     atomic.Bool
	carried atomic.Int64
	lost    atomic.Int64
	refused atomic.Int64 // of them, what opens a connection
	queue   chan packet
	done    sync.WaitGroup
}

type packet struct {
	at time.Time
	b  []byte
}

// openLink makes the device and its address.
func openLink() (*link, error) {
	fd, err := syscall.Open("/dev/net/tun", syscall.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	s, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
	if err != nil {
		return nil, err
	}
	defer syscall.Close(s)
	r, err := unix.NewIfreq("xpyd0")
	if err != nil {
		return nil, err
	}
	r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	err = errors.Join(unix.IoctlIfreq(fd, unix.TUNSETIFF, r),
		r.SetInet4Addr([]byte{10, 9, 0, 1}), unix.IoctlIfreq(s, unix.SIOCSIFADDR, r),
		r.SetInet4Addr([]byte{255, 255, 255, 0}), unix.IoctlIfreq(s, unix.SIOCSIFNETMASK, r))
	r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err = errors.Join(err, unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r)); err != nil {
		syscall.Close(fd)
		return nil, fmt.Errorf("tunnel device: %w", err)
	}
	l := &link{dev: os.NewFile(uintptr(fd), "tun"), queue: make(chan packet, linkQueue)}
	l.done.Go(l.read)
	l.done.Go(l.write)
	return l, nil
}

// read takes the kernel's packets and reflects them: with the two addresses swapped, sums
// stay right, and a packet comes from the other host.
func (l *link) read() {
	defer close(l.queue)
	rng := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, linkMTU+64)
	for {
		n, err := l.dev.Read(buf)
		if err != nil {
			return
		}
		if n < 20 || buf[0]>>4 != 4 {
			continue
		}
		b := bytes.Clone(buf[:n])
		copy(b[12:16], buf[16:20])
		copy(b[16:20], buf[12:16])
		l.carried.Add(1)
		if l.cut.Load() || rng.Float64() < linkLoss {
			l.lost.Add(1)
			if opens(b) {
				l.refused.Add(1)
			}
			continue
		}
		select {
		case l.queue <- packet{time.Now().Add(linkDelay), b}:
		default:
			l.lost.Add(1)
		}
	}
}

// opens reports whether a packet is a TCP SYN, or the answer to one.
func opens(b []byte) bool {
	tcp := b[4*int(b[0]&15):]
	return b[9] == syscall.IPPROTO_TCP && len(tcp) > 13 && tcp[13]&2 != 0
}

func (l *link) write() {
	for p := range l.queue {
		time.Sleep(time.Until(p.at))
		if l.cut.Load() { // it was under way
			l.lost.Add(1)
			continue
		}
		l.dev.Write(p.b)
	}
}

func (l *link) close() {
	l.dev.Close()
	l.done.Wait()
}

// lossy is the process in the namespace.
func lossy(f Factory, args []string) error {
	var rounds int
	var partition time.Duration
	if _, err := fmt.Sscan(strings.Join(args, " "), &rounds, &partition); err != nil {
		return err
	}
	l, err := openLink()
	if err != nil {
		return err
	}
	defer l.close()
	tr, _ := f.New(orphan{})
	w := NewWorld(orphan{}, tr, hereAddr+":0", 1, nil)
	w.Clock = NewClock(orphan{})
	w.Addr = strings.Replace(w.Addr, hereAddr, thereAddr, 1)
	defer w.Close()

	// Three seconds are enough, unless the network or the machine is at its worst.
	var o map[ticket.Outcome]int
	for by := time.Now().Add(hangs); o[ticket.Done] == 0 && time.Now().Before(by); {
		o = w.load(context.Background(), 4, 3*time.Second)
	}
	fmt.Fprintf(os.Stdout, "1%% loss, %v each way: %v, %d of %d packets lost\n", linkDelay, o, l.lost.Load(), l.carried.Load())
	if o[ticket.Done] == 0 {
		fmt.Fprintln(os.Stdout, "error nothing was transferred")
	}
	var worst time.Duration
	for n := range rounds {
		ctx, stop := context.WithCancel(context.Background())
		outcomes := make(chan map[ticket.Outcome]int, 1)
		go func() { outcomes <- w.load(ctx, 4, time.Hour) }()
		time.Sleep(time.Second)
		l.cut.Store(true)
		start := time.Now()
		time.Sleep(partition / 2)
		stop()
		o := <-outcomes
		w.Empty(w.RConfig.PeerSilence + time.Second)
		emptied := time.Since(start)
		time.Sleep(time.Until(start.Add(partition)))
		refused := l.refused.Load()
		l.cut.Store(false)
		healed, began := w.Clock.Now(), time.Now()
		var back time.Duration
		for back == 0 {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			err := w.Fetch(ctx, w.Spec("back", int32(n), 64, 0))
			cancel()
			if err == nil {
				back = time.Since(began)
			} else if w.Clock.Since(healed) > 10*time.Second {
				break
			}
		}
		w.Pool.Reclaim(w.Pool.Dest(0, 16))
		fmt.Fprintf(os.Stdout, "partition %d of %v: %v, ledgers empty %v after the cut, a transfer complete %v after the heal\n", n, partition, o, emptied.Round(time.Millisecond), back.Round(time.Millisecond))
		// A connection whose first packet is lost costs its deadline: the kernel repeats that packet after a second.
		refused = l.refused.Load() - refused
		limit := recovery + time.Duration(refused)*w.RConfig.DialTimeout
		if given := w.Clock.Since(healed); back == 0 || given > limit {
			fmt.Fprintf(os.Stdout, "error recovery took %v, with %d connections lost\n", given, refused)
		}
		worst = max(worst, back)
	}
	fmt.Fprintf(os.Stdout, "recovery %.3f s at worst of %d partitions, limit %v and %v a connection that is lost\n", worst.Seconds(), rounds, recovery, w.RConfig.DialTimeout)
	return nil
}

// load keeps n transfers going and returns what they come to.
func (w *World) load(ctx context.Context, n int, length time.Duration) map[ticket.Outcome]int {
	ctx, cancel := context.WithTimeout(ctx, length)
	defer cancel()
	var mu sync.Mutex
	all := map[ticket.Outcome]int{}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for k := int32(0); ctx.Err() == nil; k++ {
				spec := w.Spec("load", int32(1000*i)+k, 160, 64+40*i)
				err := w.Fetch(context.Background(), spec) // over by its own deadline
				w.Pool.Reclaim(spec.Dest)
				mu.Lock()
				all[kvconn.OutcomeOf(err, "untyped")]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return all
}
