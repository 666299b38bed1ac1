package fleet

// SetPaused models a stopped process: nothing is sent while it is on.
func (a *Announcer) SetPaused(on bool) { a.paused.Store(on) }

// Publish sends raw bytes on the bus, as a stranger could.
func (c *Conn) Publish(subject string, payload []byte) error { return c.nc.Publish(subject, payload) }
