package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is a child with all its descendants.
type process struct {
	name string
	cmd  *exec.Cmd
	addr string
	done chan struct{}
}

// start runs argv pinned to one processor, its output in a log file, and waits
// until addr takes connections.
func (b *bench) start(cpu int, name, addr string, argv ...string) (*process, error) {
	b.serial++
	out, err := os.Create(filepath.Join(b.tmp, fmt.Sprintf("%03d-%s.log", b.serial, name)))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command("taskset", append([]string{"-c", strconv.Itoa(cpu)}, argv...)...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), "OPENAI_API_KEY=none")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: cmd, addr: addr, done: make(chan struct{})}
	go func() { _ = cmd.Wait(); close(p.done) }() // killed, mostly
	b.procs = append(b.procs, p)
	for deadline := time.Now().Add(60 * time.Second); ; {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			c.Close()
			return p, nil
		}
		select {
		case <-p.done:
			err = fmt.Errorf("it ended")
		case <-time.After(50 * time.Millisecond):
			if time.Now().Before(deadline) {
				continue
			}
		}
		p.stop()
		text, _ := os.ReadFile(out.Name())
		return nil, fmt.Errorf("%s does not listen on %s: %w\n%s", name, addr, err, tail(text, 2000))
	}
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

func (p *process) stop() {
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // it may be gone
	<-p.done
}

// tree is the process and its descendants.
func (p *process) tree() []int {
	parents := map[int]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it ended
		}
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		after := text[strings.LastIndexByte(string(text), ')')+2:]
		parents[pid], _ = strconv.Atoi(strings.Fields(string(after))[1])
	}
	all := []int{p.cmd.Process.Pid}
	for i := 0; i < len(all); i++ {
		for pid, parent := range parents {
			if parent == all[i] {
				all = append(all, pid)
			}
		}
	}
	return all
}

// cpu is the processor time, user and system, that the tree has used.
func (p *process) cpu() time.Duration {
	var sum time.Duration
	for _, pid := range p.tree() {
		var ts unix.Timespec
		clock := int32(^pid)<<3 | 2 // the kernel's id of a process's CPU clock (man clock_getcpuclockid)
		if unix.ClockGettime(clock, &ts) == nil {
			sum += time.Duration(ts.Nano())
		}
	}
	return sum
}

// rss is the resident memory of the tree in bytes.
func (p *process) rss() int {
	sum := 0
	for _, pid := range p.tree() {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
		if f := strings.Fields(string(text)); len(f) > 1 {
			pages, _ := strconv.Atoi(f[1])
			sum += pages * os.Getpagesize()
		}
	}
	return sum
}

// freeAddr is a loopback address that nobody listens on now.
func freeAddr() (string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer ln.Close()
	return ln.Addr().String(), nil
}

// answers waits until a completion through addr is a 200.
func answers(addr string) error {
	var last string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		resp, err := http.Post("http://"+addr+"/v1/completions", "application/json", strings.NewReader(body("hello", false, 1, "")))
		if err != nil {
			last = err.Error()
			continue
		}
		resp.Body.Close()
		if resp.StatusCode == 200 {
			return nil
		}
		last = resp.Status
	}
	return fmt.Errorf("%s answers no completion: %s", addr, last)
}
