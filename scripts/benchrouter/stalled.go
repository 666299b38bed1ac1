package main

import (
	"fmt"
	"log"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/xpyd/xpyd/internal/figures"
)

// stalled measures what a client costs that asks for a stream without end and
// does not read it: the router's memory, and what the kernel holds for both of
// its connections.
func (b *bench) stalled() error {
	const clients, limit = 200, 256.0
	p, err := b.router()
	if err != nil {
		return err
	}
	defer p.stop()
	if _, err := drive(p.addr, clients, 20*clients, request("/v1/completions", body(prompt(2<<10), true, 16, ""))); err != nil { // what stays
		return err
	}
	req := request("/v1/completions", body(prompt(2<<10), true, 1<<30, ""))
	before := p.rss()
	for range clients {
		c, err := net.Dial("tcp", p.addr)
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write(req); err != nil {
			return err
		}
	}
	last, held, since := -1, 0, time.Now()
	for { // until nothing grows any more
		time.Sleep(time.Second)
		if held, err = queued(p.addr, b.d); err != nil {
			return err
		}
		if held == last || time.Since(since) > 30*time.Second {
			break
		}
		last = held
	}
	own := float64(p.rss()-before) / 1024 / clients
	kb := own + float64(held)/1024/clients
	said := fmt.Sprintf("%d clients that do not read: %.1f KB each, %.1f of it the router's", clients, kb, own)
	log.Print(said)
	b.book.Logf("stalled: %s", said)
	return b.figure(figures.Figure{Name: "router.stalled_client_kb", Value: kb, Unit: "KB a client", Peer: "limit", PeerValue: limit, Ratio: kb / limit, Runs: 1,
		Model:  fmt.Sprintf("mock engines, %d streams without end that are not read; resident memory and the kernel's queues of both connections", clients),
		Spread: fmt.Sprintf("one run; %.1f KB the router's", own)})
}

// queued is what the kernel holds of the router's: bytes to be sent to its
// clients, and bytes from the engine that it has not read.
func queued(router, engine string) (int, error) {
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0, err
	}
	port := func(addr string) string {
		_, p, _ := net.SplitHostPort(addr)
		n, _ := strconv.Atoi(p)
		return fmt.Sprintf(":%04X", n)
	}
	sum := 0
	for _, line := range strings.Split(string(table), "\n")[1:] {
		f := strings.Fields(line)
		if len(f) < 5 {
			continue
		}
		out, in, _ := strings.Cut(f[4], ":")
		if !strings.HasSuffix(f[1], port(router)) {
			out = "0"
		}
		if !strings.HasSuffix(f[2], port(engine)) {
			in = "0"
		}
		for _, hex := range []string{out, in} {
			n, err := strconv.ParseInt(hex, 16, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/net/tcp: %w", err)
			}
			sum += int(n)
		}
	}
	return sum, nil
}
