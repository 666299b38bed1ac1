// Package kvconn moves KV blocks from a prefill worker (the sender, which
// listens) to a decode worker (the receiver, which dials).
//
// The receiver reserves blocks, opens a session to the sender and sends it a
// ticket that names them; the sender pushes exactly the rows that are missing,
// layer by layer while it computes, then a commit. Nothing is sent without a
// ticket, nothing is stored without a digest check, and after Incoming.Revoke
// returns nothing is stored at all. How the bytes look, which goroutine owns
// what, and why the fence holds is in DESIGN.md.
//
// Receiver side (decode):
//
//	r, err := kvconn.NewReceiver(cfg, transport, log, metrics)
//	s, err := r.Open(ctx, addr, kvconn.PeerID{ID: "prefill-0", Epoch: 7})
//	in, err := s.Request(ctx, kvconn.TicketSpec{Link: link, Dest: blocks, Sink: pool, ...})
//	commit, err := in.Wait(ctx) // every block verified, and the first tokens
//	in.Revoke(ctx)              // on any error, before the blocks are reused
//
// Sender side (prefill):
//
//	srv, err := kvconn.NewServer(cfg, log, metrics)
//	err = srv.Serve(ctx, listener, handler) // handler.OnTicket: Accept, Push…, Commit
//
// Memory is reached through Sink and Source, or written by the peer through a
// transport's Window and Hold (mapped.go, lent.go); the package calls no device
// itself. Transports are handed in; see Transport, kvconn/tcp and kvconn/kvconntest.
//
// Non-goals: choosing peers, retrying on another pair (the router does both),
// allocating blocks, hiding the bytes from an eavesdropper (use a private
// network), and converting rows (package convert, on the sender's side).
package kvconn
