package config

// Current is what is in force; it must not be written to.
func (r *Reloader[T]) Current() *T { return r.current.Load() }
